"""smoke_eval of a reward model: serve it for real, and prove that it scores as training did.

The served folder is loaded by the engine that will serve it. Its scores on the probes are compared
with the live training engine's; held-out pairs tell how often it prefers the chosen answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import DataError
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.reward_scores import SCORES, ScorePrint, score_drift
from tasks.drift.verdict import verdict
from tasks.evaluation.evaluation_prompts import context_of, dtype_of, read_pairs
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.served_scores import Scoring
from tasks.evaluation.smoke import SmokeSettings, before_loading
from tasks.pipeline.report import StageReport
from tasks.process.output import Log

CHANCE = 0.5
"""Share of pairs that a head which knows nothing puts in the right order."""


def smoke_rewards(
    out: Path,
    *,
    served: Path,
    data: Path,
    trained: Path,
    engine: str,
    profile: DriftLimit,
    settings: SmokeSettings,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
) -> StageReport:
    """Load, score, judge.

    Args:
        out: staging directory; gets `report.json`, `scores.json`, `pairs.jsonl`.
        served: the folder to serve.
        data: dataset artifact with pairs in `heldout.jsonl`.
        trained: shards artifact with the training engine's `scores.json`.
        engine: "vllm" or "transformers".
        profile: the drift that it may show.
        settings: how the engine is run, and how many pairs are scored.
        scorer: the transformers child.
        log: progress and the engine's output.
        log_path: file for the engine's whole output.

    Raises:
        DataError: there are no held-out pairs that fit the model's context.
        StageProcessError: the engine did not come up or broke down.
    """
    alone = before_loading(engine, served)
    if not alone.ok:
        return StageReport("report", checks=(alone,))
    reference = ScorePrint.load(trained / SCORES)
    pairs = _encoded(served, data, scorer, settings)
    texts = [*map(list, reference.probes), *(ids for pair in pairs for ids in pair)]
    dtype = dtype_of(served)
    how = Scoring(settings, scorer, log, log_path)
    scores = how.raw(engine, ModelRef(served, dtype=dtype), texts, out=out)
    count = len(reference.probes)
    now = ScorePrint(reference.probes, tuple(scores[:count]), engine)
    now.save(out / SCORES)
    moved = score_drift(reference, now)
    chosen, rejected = scores[count::2], scores[count + 1 :: 2]
    right = sum(a > b for a, b in zip(chosen, rejected, strict=True)) / len(pairs)
    checks = (
        alone,
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        verdict(moved, profile, name="drift of the engine's scores from the trained model's"),
    )
    metrics = {
        "eval/before": CHANCE,
        "eval/after": right,
        "eval/pairs": float(len(pairs)),
        **{f"reward/{name}": value for name, value in moved.as_dict().items()},
    }
    _write(out, checks, metrics, list(zip(chosen, rejected, strict=True)))
    log.info(
        "smoke_eval: %.1f %% of %d pairs in the right order, scores move by %.2e of their spread",
        100 * right, len(pairs), moved.mean_difference,
    )  # fmt: skip
    notes = {"engine": engine, "settings": asdict(settings)}
    return StageReport("report", checks, metrics, notes, moved)


def _encoded(
    served: Path, data: Path, scorer: ReferenceScorer, settings: SmokeSettings
) -> list[tuple[list[int], list[int]]]:
    pairs = read_pairs(data / "heldout.jsonl")[: settings.eval_samples]
    texts = scorer.encode_whole(served, [one for pair in pairs for one in pair])
    context = context_of(served)
    longest = min(context, settings.max_model_len or context)
    found = list(zip(texts[::2], texts[1::2], strict=True))
    fitting = [pair for pair in found if max(map(len, pair)) <= longest]
    if not fitting:
        raise DataError(
            f"none of {len(found)} held-out pairs fits into {longest} tokens",
            hint="smoke.max_model_len=... (larger), or other held-out data",
        )
    return fitting


def _write(
    out: Path,
    checks: Sequence[Check],
    metrics: Mapping[str, float],
    pairs: Sequence[tuple[float, float]],
) -> None:
    document: dict[str, Any] = {
        "checks": [one.as_dict() for one in checks],
        "metrics": dict(metrics),
    }
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    with (out / "pairs.jsonl").open("w") as file:
        for chosen, rejected in pairs:
            file.write(json.dumps({"chosen": chosen, "rejected": rejected}) + "\n")
