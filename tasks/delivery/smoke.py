"""The reference of a delivery, and the smoke test that compares the served folder with it.

A delivery has no live training engine. For an adapter the reference is base + adapter, unmerged, in
peft; for a full model it is the model of SOURCE, gathered if needed. Drift from this reference
checks gather, merge, convert and the engine. It does not check training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.delivery.engine import EngineSettings, ask_vllm, encode_probes
from tasks.drift.fingerprint import DriftLimit, Fingerprint, drift, within
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import dtype_of
from tasks.evaluation.greedy_ties import compare_greedy, engine_noise
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.report import StageReport
from tasks.serving.vllm.job import Job
from tasks.weights.files.reader import read_json


def reference(
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
    weights: Mapping[str, float] | None = None,
    **further: Path,
) -> StageReport:
    """Take the fingerprint of the model as SOURCE has it; a stage function.

    Args:
        out: staging directory; gets `fingerprint.fp`.
        model: folder of a full model, or of the base of `adapter`.
        texts: texts to measure on.
        limit: maximum number of tokens of a text.
        tokenizer: folder of the tokenizer.
        dtype: torch dtype name to load the model in.
        attn_implementation: attention, by transformers' name.
        scorer: the transformers child.
        log: gets progress.
        adapter: PEFT folder of the adapter, or of the first of several.
        quantization: quantization of the base, as `ModelRef.quantization`.
        weights: weights of the adapters by role; None for one adapter with weight 1.
        **further: PEFT folders of the other adapters, by role.

    Raises:
        DataError: all texts are too short.
    """
    probes = encode_probes(scorer, tokenizer, texts, limit)
    adapters = {"adapter": adapter, **further}
    weighted = {str(adapters[name]): weight for name, weight in (weights or {}).items()}
    ref = ModelRef(model, adapter, quantization, dtype, attn_implementation, weighted)
    fingerprint = scorer.reference(ref, probes, out / FINGERPRINT)
    log.info("reference: %d positions of %d texts", fingerprint.positions, len(probes))
    return StageReport("reference", (), {"positions": float(fingerprint.positions)})


def smoke(
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
    """Serve the folder, and compare fingerprint and greedy tokens; a stage function.

    Args:
        out: staging directory; gets `report.json`, `fingerprint.fp`.
        served: folder to serve.
        reference: folder with the `fingerprint.fp` of the reference.
        engine: "vllm" or "transformers".
        settings: settings of the engine.
        profile: limits of the drift.
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
    before = Fingerprint.load(reference / FINGERPRINT)
    dtype = dtype_of(served)
    model = ModelRef(served, dtype=dtype, attn_implementation=attn_implementation)
    prompts = [list(probe) for probe in before.probes]
    expected = scorer.greedy(
        model, prompts, max_new_tokens=settings.greedy_tokens, eos=_stops(served)
    )
    if engine == "vllm":
        job = Job(
            served=str(served),
            out="",
            prompts=prompts,
            max_new_tokens=settings.greedy_tokens,
            max_model_len=settings.longest(prompts),
            reference=str(reference / FINGERPRINT),
            dtype=dtype,
        )
        tokens = ask_vllm(job, settings, out=out, log=log, log_path=log_path)["served"]["tokens"]
        after = Fingerprint.load(out / FINGERPRINT)
    else:
        after = scorer.fingerprint(model, reference / FINGERPRINT, out / FINGERPRINT)
        tokens = expected.tokens
    moved = drift(before, after)
    noise = engine_noise(before, after)
    agreement = compare_greedy(tokens, expected.tokens, expected.candidates, noise, dtype)
    where = f"{engine}, of the folder that convert made" if within(moved, profile) else ""
    checks = (
        smoke_checks.no_strays(strays),
        smoke_checks.loaded_check(engine),
        smoke_checks.drift_check(moved, profile, where),
        smoke_checks.greedy_check(agreement, settings.greedy_tokens),
    )
    document = {
        "engine": engine,
        "checks": [check.as_dict() for check in checks],
        **asdict(moved),
    }
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    log.info("smoke_eval: mean KL %.2e in %s", moved.mean_kl, engine)
    notes = {"engine": engine, "settings": asdict(settings)}
    return StageReport("report", checks, {}, notes, moved)


def _stops(served: Path) -> list[int]:
    """Return the EOS ids in the folder's generation_config.json."""
    eos = read_json(served / "generation_config.json").get("eos_token_id")
    return list(eos) if isinstance(eos, list) else [] if eos is None else [int(eos)]
