"""smoke_eval: serve the model for real and prove that it is the one that was trained.

The served folder is loaded by the engine that will serve it (vLLM, or transformers as the native
fallback). Its fingerprint is compared with the live training engine's, its first greedy tokens with
transformers', and its answers to held-out prompts are read: do they stop, do they loop, are they
right (where the data says what is), and were they before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tasks.core.contract import Check
from tasks.drift.fingerprint import DriftLimit, Fingerprint, drift, within
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import (
    answerable,
    context_of,
    dtype_of,
    question_of,
    read_heldout,
)
from tasks.evaluation.responses import describe, numbers, read_answers, write_report
from tasks.evaluation.sampled_responses import read_drawn
from tasks.evaluation.scoring import Prompts, ReferenceScorer
from tasks.evaluation.serve import Question
from tasks.evaluation.smoke import (
    SmokeSettings,
    agree_greedily,
    ask_engine,
    before_loading,
    who_moved,
)
from tasks.pipeline.report import StageReport
from tasks.process.output import Log


def smoke_eval(
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
    reward: Path | None = None,
    temperature: float | None = None,
    history: Mapping[str, Mapping[str, float]] | None = None,
) -> StageReport:
    """Load, measure, read, judge.

    Args:
        out: staging directory; gets `report.json`, `fingerprint.fp`, `generations.jsonl`.
        served: the folder to serve.
        base: the model before training, for `eval/before`.
        data: dataset artifact with `heldout.jsonl`.
        trained: shards artifact with the training engine's `fingerprint.fp`.
        engine: "vllm" or "transformers".
        profile: the drift it may show.
        settings: the rest.
        scorer: the transformers child.
        log: progress and the engine's output.
        log_path: file for the engine's whole output.
        reward: folder of the reward model that the model learnt from, where there is one.
        temperature: draw answers too, as a policy that learns from its own replies does.
        history: drifts that earlier stages recorded, by stage, in the order of the chain.

    Returns:
        Report of kind `report`. A folder with stray weight files is not loaded at all.

    Raises:
        DataError: there is nothing held out.
        StageProcessError: the engine did not come up or broke down.
    """
    alone = before_loading(engine, served)
    if not alone.ok:
        return StageReport("report", checks=(alone,))
    reference = Fingerprint.load(trained / FINGERPRINT)
    rows = read_heldout(data / "heldout.jsonl")
    rendered = scorer.encode(served, rows)
    context = context_of(served)
    longest = min(context, settings.max_model_len or context)
    asked_of = answerable(rows, rendered, longest=longest, answer=settings.max_new_tokens)
    asked = asked_of[: max(settings.eval_samples, len(reference.probes))]
    question = Question(
        served=served,
        base=base,
        reference=trained / FINGERPRINT,
        messages=[question_of(rows[i]) for i in asked],
        prompts=Prompts([rendered.tokens[i] for i in asked], rendered.eos),
        base_prompts=scorer.encode(base, [rows[i] for i in asked], template_from=served),
        dtype=dtype_of(served),
        temperature=temperature,
    )
    answered = ask_engine(engine, question, settings, out=out, scorer=scorer, log=log,
                      log_path=log_path)  # fmt: skip
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
        smoke_checks.probes_check(reference.probes, rendered.tokens),
        smoke_checks.template_check(answered.rendered_differently, len(asked)),
        smoke_checks.stop_check(answered.after.stopped, settings.min_stop_rate),
        smoke_checks.degenerate_check(answered.after.tokens, settings.max_degenerate_rate),
    )
    picked = [rows[i] for i in asked]
    metrics = read_answers(out, picked, question, answered, scorer)
    metrics |= read_drawn(out, picked, question, answered, scorer, reward)
    metrics |= numbers(moved, agreement, answered, left_out=len(rows) - len(asked_of))
    notes = {
        "engine": engine,
        "settings": asdict(settings),
        "drift_appeared_at": appeared_at or None,
        "greedy_differences": list(agreement.differences[:20]),
    }
    write_report(out, checks, metrics, notes)
    log.info(
        "smoke_eval: %smean KL %.2e, %.0f tokens/s",
        describe(metrics), moved.mean_kl, metrics["tokens_per_s"],
    )  # fmt: skip
    return StageReport("report", checks, metrics, notes, moved)
