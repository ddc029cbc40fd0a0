"""smoke_eval of a model trained on raw texts: serve it, and prove that it is the trained model.

The engine that will serve the model loads the served folder. Its fingerprint is compared with the
live training engine's, its greedy continuations of held-out texts with those of transformers. A raw
text has no answer to compare with and no place to stop, so the held-out loss alone says what
training improved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tasks.core.contract import Check
from tasks.core.errors import DataError
from tasks.drift.fingerprint import Fingerprint
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation.evaluation_prompts import read_texts
from tasks.evaluation.responses import numbers
from tasks.evaluation.scoring import Prompts, ReferenceScorer
from tasks.evaluation.serve import Question
from tasks.evaluation.smoke import Measured, SmokeTest, smoke_test
from tasks.pipeline.report import StageReport
from tasks.serving.prompts import stop_ids

PROMPT_TOKENS = 64
"""Tokens of a text that become the prompt; half of a shorter text."""
TEXTS_AT_ONCE = 64


@smoke_test
def smoke_texts(test: SmokeTest, out: Path, *, base: Path, data: Path) -> StageReport:
    """Serve a model of raw texts and compare it with the trained one.

    Args:
        test: the common arguments.
        out: staging directory; gets `report.json`, `fingerprint.fp`, `generations.jsonl`.
        base: the model before training, which continues the same texts.
        data: dataset artifact with `heldout.jsonl`, raw texts.

    Raises:
        DataError: no held-out text leaves room for a continuation.
        StageProcessError: the engine did not start or crashed.
    """
    reference = Fingerprint.load(test.trained / FINGERPRINT)
    texts = read_texts(data / "heldout.jsonl")
    count = max(test.settings.eval_samples, len(reference.probes))
    question = _question(test, base, texts[:count])
    measured = test.measure(question, out)
    checks = (
        *measured.checks,
        _known_probes(reference.probes, texts, test.scorer, question),
    )
    _write_continuations(out, measured, test.scorer)
    metrics = numbers(measured, left_out=0)
    for name in ("stop_rate", "eval/left_out"):
        del metrics[name]
    report = test.report(out, checks, metrics, measured.drift, measured.notes)
    test.log.info(
        "smoke_eval: mean KL %.2e, %.0f tokens/s", measured.drift.mean_kl, metrics["tokens_per_s"]
    )
    return report


def _question(test: SmokeTest, base: Path, texts: Sequence[str]) -> Question:
    """Return the first tokens of each text as prompts."""
    new_tokens = test.settings.max_new_tokens
    room = test.max_len - new_tokens
    ids = test.scorer.encode_texts(test.served, texts, limit=2 * PROMPT_TOKENS)
    tokens = [text[: min(PROMPT_TOKENS, max(1, len(text) // 2), room)] for text in ids if text]
    if room < 1 or not tokens:
        raise DataError(
            f"no held-out text of {len(texts)} leaves room for {new_tokens} new tokens",
            hint="smoke.max_new_tokens=... (smaller), or other held-out texts",
        )
    prompts = Prompts(tokens, stop_ids(test.served, None))
    return Question(
        served=test.served,
        base=base,
        reference=test.trained / FINGERPRINT,
        chats=None,
        prompts=prompts,
        base_prompts=prompts,  # without a template both models read the same
        dtype=test.model.dtype,
        attn_implementation=test.attn_implementation,
    )


def _known_probes(
    probes: Sequence[Sequence[int]],
    texts: Sequence[str],
    scorer: ReferenceScorer,
    question: Question,
) -> Check:
    """Check that the served tokenizer gives training's tokens: each probe is part of a text."""
    left = {np.asarray(probe, np.int32).tobytes() for probe in probes}
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        if not left:
            break
        some = texts[start : start + TEXTS_AT_ONCE]
        for ids in scorer.encode_texts(question.served, some, limit=1 << 30):
            whole = list(_with_end(ids, question.prompts.eos))
            left = {probe for probe in left if not any(_contains(text, probe) for text in whole)}
    total = len({tuple(probe) for probe in probes})
    return Check(
        "texts as training tokenised them",
        "a run of tokens for every probe",
        f"{total - len(left)} of {total}",
        ok=not left,
    )


def _with_end(ids: Sequence[int], ends: Sequence[int]) -> Iterator[bytes]:
    """Yield a text followed by each of the ids that can end it, as bytes of int32."""
    for end in ends:
        yield np.asarray([*ids, end], np.int32).tobytes()


def _contains(whole: bytes, part: bytes) -> bool:
    """Return True if one sequence of int32 occurs in another one."""
    at = whole.find(part)
    while at % 4 and at >= 0:
        at = whole.find(part, at + 1)
    return at >= 0


def _write_continuations(out: Path, measured: Measured, scorer: ReferenceScorer) -> None:
    """Write `generations.jsonl`: continuations of the texts before and after training."""
    shown = scorer.decode(measured.question.served, measured.question.prompts.tokens)
    before, after = measured.texts(scorer)
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for prompt, old, new in zip(shown, before, after, strict=True):
            line = {"text": prompt, "before": old, "after": new}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
