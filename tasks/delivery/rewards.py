"""The smoke test of a reward model: the rewards it gave before, and those the served folder gives.

They are normalised as the files say; how far they may part is the drift profile's to say.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.delivery.engine import EngineSettings, encode_probes
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.reward_scores import SCORES, ScorePrint, score_drift
from tasks.drift.verdict import verdict
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.served_scores import Scoring
from tasks.pipeline.report import StageReport
from tasks.serving.reference.rewards import normalised
from tasks.weights.files.reader import read_json
from tasks.weights.heads.normalisation import normalisation_from


def reward_reference(
    out: Path,
    *,
    model: Path,
    texts: list[str],
    limit: int,
    tokenizer: Path,
    dtype: str,
    attn_implementation: str,
    scorer: ReferenceScorer,
    log: Any,
    adapter: Path | None = None,
    quantization: dict[str, Any] | None = None,
) -> StageReport:
    """Score texts with the reward model as it was before anything here touched it.

    Args:
        out: staging directory; gets `scores.json`.
        model: reward model, or the base of `adapter`.
        texts: what is scored.
        limit: tokens of a text at most.
        tokenizer: folder of the tokenizer.
        dtype: torch name of the dtype in which it is loaded.
        attn_implementation: as in transformers.
        scorer: the transformers child.
        log: progress.
        adapter: PEFT folder that brings the head; unmerged.
        quantization: of the base, as `ModelRef.quantization`.

    Raises:
        DataError: no text is long enough.
    """
    probes = encode_probes(scorer, tokenizer, texts, limit)
    scores = scorer.rewards(
        ModelRef(model, adapter, quantization, dtype, attn_implementation), probes
    )
    _print(probes, scores, "transformers").save(out / SCORES)
    log.info("reference: rewards of %d texts", len(probes))
    return StageReport("reference", (), {"texts": float(len(probes))})


def reward_smoke(
    out: Path,
    *,
    served: Path,
    reference: Path,
    engine: str,
    settings: EngineSettings,
    profile: DriftLimit,
    attn_implementation: str,
    scorer: ReferenceScorer,
    log: Any,
    log_path: Path,
) -> StageReport:
    """Load the served folder, score the same texts, compare.

    Args:
        out: staging directory; gets `report.json`, `scores.json`.
        served: the folder to serve.
        reference: folder with the reference's `scores.json`.
        engine: "vllm" or "transformers".
        settings: how it is run.
        profile: the difference it may show.
        attn_implementation: of transformers, where that computes.
        scorer: the transformers child.
        log: progress and the engine's output.
        log_path: file for all of that.

    Raises:
        StageProcessError: the engine did not come up or broke down.
    """
    strays = smoke_checks.stray_weights(served)
    if strays:
        return StageReport("report", (smoke_checks.no_strays(strays),))
    before = ScorePrint.load(reference / SCORES)
    probes, dtype = [list(probe) for probe in before.probes], dtype_of(served)
    model = ModelRef(served, dtype=dtype, attn_implementation=attn_implementation)
    raw = Scoring(settings, scorer, log, log_path).raw(engine, model, probes, out=out)
    scores = normalised(raw, normalisation_from(read_json(served / "config.json"))[0])
    now = _print(probes, scores, engine)
    now.save(out / SCORES)
    moved = score_drift(before, now)
    checks = (
        smoke_checks.no_strays(strays),
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        verdict(moved, profile, name="rewards against those before"),
    )
    document = {"engine": engine, "checks": [one.as_dict() for one in checks], **asdict(moved)}
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    log.info("smoke_eval: rewards move by %.2e of their spread", moved.mean_difference)
    metrics = {f"reward/{name}": value for name, value in asdict(moved).items()}
    return StageReport("report", checks, metrics, {"engine": engine, "settings": asdict(settings)})


def _print(probes: list[list[int]], scores: list[float], engine: str) -> ScorePrint:
    return ScorePrint(tuple(map(tuple, probes)), tuple(scores), engine)
