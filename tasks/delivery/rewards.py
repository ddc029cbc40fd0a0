"""The reference and the smoke test of a reward model, compared by reward.

Rewards are normalised with mean and standard deviation from the model's files. The drift profile
limits their difference.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    """Score texts with the reward model as SOURCE has it; a stage function.

    Args:
        out: staging directory; gets `scores.json`.
        model: folder of the reward model, or of the base of `adapter`.
        texts: texts to score.
        limit: maximum number of tokens of a text.
        tokenizer: folder of the tokenizer.
        dtype: torch dtype name to load the model in.
        attn_implementation: attention, by transformers' name.
        scorer: the transformers child.
        log: gets progress.
        adapter: PEFT folder with the head; it stays unmerged.
        quantization: quantization of the base, as `ModelRef.quantization`.

    Raises:
        DataError: all texts are too short.
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
    """Serve the folder, score the same texts, and compare the rewards; a stage function.

    Args:
        out: staging directory; gets `report.json`, `scores.json`.
        served: folder to serve.
        reference: folder with the `scores.json` of the reference.
        engine: "vllm" or "transformers".
        settings: settings of the engine.
        profile: limits of the difference.
        attn_implementation: attention of the engine "transformers".
        scorer: the transformers child.
        log: gets progress and the engine's output.
        log_path: file for the engine's whole output.

    Raises:
        StageProcessError: the engine did not start or crashed.
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
        smoke_checks.loaded_check(engine),
        verdict(moved, profile, name="rewards against those before"),
    )
    document = {"engine": engine, "checks": [check.as_dict() for check in checks], **asdict(moved)}
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    log.info("smoke_eval: rewards move by %.2e of their spread", moved.mean_difference)
    metrics = {f"reward/{name}": value for name, value in asdict(moved).items()}
    return StageReport("report", checks, metrics, {"engine": engine, "settings": asdict(settings)})


def _print(probes: list[list[int]], scores: list[float], engine: str) -> ScorePrint:
    return ScorePrint(tuple(map(tuple, probes)), tuple(scores), engine)
