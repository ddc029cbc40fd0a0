"""smoke_eval of a model trained on raw texts: serve it for real, and prove that it is that model.

The served folder is loaded by the engine that will serve it. Its fingerprint is compared with the
live training engine's, and how it goes on with held-out texts with transformers' way of going on.
A text has no answer to be held to and no place where it has to stop: what training was worth is
said by the held-out loss alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tasks.core.contract import Check
from tasks.core.errors import DataError
from tasks.drift.fingerprint import DriftLimit, Fingerprint, drift, within
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import context_of, dtype_of, read_texts
from tasks.evaluation.responses import numbers, write_report
from tasks.evaluation.scoring import Prompts, ReferenceScorer
from tasks.evaluation.serve import Question, Served
from tasks.evaluation.smoke import (
    SmokeSettings,
    agree_greedily,
    ask_engine,
    before_loading,
    who_moved,
)
from tasks.pipeline.report import StageReport
from tasks.process.output import Log
from tasks.serving.prompts import stop_ids

PROMPT_TOKENS = 64
"""Of a text that the engine goes on with; half of a shorter one."""
TEXTS_AT_ONCE = 64


def smoke_texts(
    out: Path,
    *,
    served: Path,
    base: Path,
    data: Path,
    trained: Path,
    engine: str,
    profile: DriftLimit,
    settings: SmokeSettings,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
    history: Mapping[str, Mapping[str, float]] | None = None,
) -> StageReport:
    """Load, measure, judge.

    Args:
        out: staging directory; gets `report.json`, `fingerprint.fp`, `generations.jsonl`.
        served: the folder to serve.
        base: the model before training, which goes on with the same texts.
        data: dataset artifact with texts in `heldout.jsonl`.
        trained: shards artifact with the training engine's `fingerprint.fp`.
        engine: "vllm" or "transformers".
        profile: the drift it may show.
        settings: the rest; what concerns answers plays no part.
        scorer: the transformers child.
        log: progress and the engine's output.
        log_path: file for the engine's whole output.
        history: drifts that earlier stages recorded, by stage, in the order of the chain.

    Raises:
        DataError: there is nothing held out that leaves room to go on.
        StageProcessError: the engine did not come up or broke down.
    """
    alone = before_loading(engine, served)
    if not alone.ok:
        return StageReport("report", checks=(alone,))
    reference = Fingerprint.load(trained / FINGERPRINT)
    texts = read_texts(data / "heldout.jsonl")
    count = max(settings.eval_samples, len(reference.probes))
    question = _question(
        texts[:count], settings, scorer, served=served, base=base, reference=trained / FINGERPRINT
    )
    answered = ask_engine(
        engine, question, settings, out=out, scorer=scorer, log=log, log_path=log_path
    )
    agreement = agree_greedily(question, answered, settings, scorer, len(reference.probes))
    moved = drift(reference, answered.fingerprint)
    appeared_at = ""
    if within(moved, profile):
        appeared_at = who_moved(question, profile, scorer, history or {}, engine)
    checks = (
        alone,
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        smoke_checks.drift_check(moved, profile, appeared_at),
        smoke_checks.greedy_check(agreement, settings.greedy_tokens),
        _known_probes(reference.probes, texts, scorer, question),
    )
    _write_continuations(out, question, answered, scorer)
    found = numbers(moved, agreement, answered, left_out=0)
    metrics = {k: v for k, v in found.items() if k not in ("stop_rate", "eval/left_out")}
    notes = {
        "engine": engine,
        "settings": asdict(settings),
        "drift_appeared_at": appeared_at or None,
        "greedy_differences": list(agreement.differences[:20]),
    }
    write_report(out, checks, metrics, notes)
    log.info("smoke_eval: mean KL %.2e, %.0f tokens/s", moved.mean_kl, metrics["tokens_per_s"])
    return StageReport("report", checks, metrics, notes, moved)


def _question(
    texts: Sequence[str],
    settings: SmokeSettings,
    scorer: ReferenceScorer,
    *,
    served: Path,
    base: Path,
    reference: Path,
) -> Question:
    """Beginnings of texts to go on with."""
    context = context_of(served)
    room = min(context, settings.max_model_len or context) - settings.max_new_tokens
    ids = scorer.encode_texts(served, texts, limit=2 * PROMPT_TOKENS)
    prompts = [one[: min(PROMPT_TOKENS, max(1, len(one) // 2), room)] for one in ids if one]
    if room < 1 or not prompts:
        wanted = settings.max_new_tokens
        raise DataError(
            f"no held-out text of {len(texts)} leaves room for {wanted} new tokens",
            hint="smoke.max_new_tokens=... (smaller), or other held-out texts",
        )
    asked = Prompts(prompts, stop_ids(served, None))
    return Question(
        served=served,
        base=base,
        reference=reference,
        messages=None,
        prompts=asked,
        base_prompts=asked,  # without a template both models read the same
        dtype=dtype_of(served),
    )


def _known_probes(
    probes: Sequence[Sequence[int]],
    texts: Sequence[str],
    scorer: ReferenceScorer,
    question: Question,
) -> Check:
    """The served tokenizer makes of the texts what training saw: each probe is a run of one."""
    left = {np.asarray(probe, np.int32).tobytes() for probe in probes}
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        if not left:
            break
        some = texts[start : start + TEXTS_AT_ONCE]
        for ids in scorer.encode_texts(question.served, some, limit=1 << 30):
            whole = list(_ended(ids, question.prompts.eos))
            left = {probe for probe in left if not any(_holds(one, probe) for one in whole)}
    total = len({tuple(probe) for probe in probes})
    return Check(
        "texts as training tokenised them",
        "a run of tokens for every probe",
        f"{total - len(left)} of {total}",
        ok=not left,
    )


def _ended(ids: Sequence[int], ends: Sequence[int]) -> Iterator[bytes]:
    """A text with each end that may stand behind it."""
    for end in ends:
        yield np.asarray([*ids, end], np.int32).tobytes()


def _holds(whole: bytes, part: bytes) -> bool:
    """Whether a row of int32 occurs in another one."""
    at = whole.find(part)
    while at % 4 and at >= 0:
        at = whole.find(part, at + 1)
    return at >= 0


def _write_continuations(
    out: Path, question: Question, answered: Served, scorer: ReferenceScorer
) -> None:
    """Write `generations.jsonl`: how texts went on, before training and after."""
    shown = scorer.decode(question.served, question.prompts.tokens)
    after = scorer.decode(question.served, answered.after.tokens)
    before = scorer.decode(question.base, answered.before.tokens)
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for prompt, old, new in zip(shown, before, after, strict=True):
            line = {"text": prompt, "before": old, "after": new}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
