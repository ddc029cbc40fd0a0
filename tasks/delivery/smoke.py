"""The reference of a delivery, and the served folder beside it in the engine that will serve it.

No training engine is there to ask. For an adapter the reference is base + adapter through peft in
transformers, unmerged; for a full model it is the model as SOURCE (or its gathering) has it. Drift
from there proves gather, merge, convert and the server, and it proves nothing about training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
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
    """Measure the model as it was before anything here touched it.

    Args:
        out: staging directory; gets `fingerprint.fp`.
        model: full model, or the base of `adapter`.
        texts: what it is measured on.
        limit: tokens of a text at most.
        tokenizer: folder of the tokenizer.
        dtype: torch name of the dtype in which it is loaded.
        attn_implementation: as in transformers.
        scorer: the transformers child.
        log: progress.
        adapter: PEFT folder; the first of several.
        quantization: of the base, as `ModelRef.quantization`.
        weights: of the adapters by role, where they are not one of weight 1.
        further: the adapters after the first, by role.

    Raises:
        DataError: no text is long enough.
    """
    probes = encode_probes(scorer, tokenizer, texts, limit)
    adapters = {"adapter": adapter, **further}
    weighted = {str(adapters[name]): weight for name, weight in (weights or {}).items()}
    ref = ModelRef(model, adapter, quantization, dtype, attn_implementation, weighted)
    found = scorer.reference(ref, probes, out / FINGERPRINT)
    log.info("reference: %d positions of %d texts", found.positions, len(probes))
    return StageReport("reference", (), {"positions": float(found.positions)})


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
    """Load the served folder, measure it, compare.

    Args:
        out: staging directory; gets `report.json`, `fingerprint.fp`.
        served: the folder to serve.
        reference: folder with the reference's `fingerprint.fp`.
        engine: "vllm" or "transformers".
        settings: how it is run.
        profile: the drift it may show.
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
    agreement = compare_greedy(
        tokens, expected.tokens, expected.candidates, noise, dtype_of(served)
    )
    where = f"{engine}, of the folder that convert made" if within(moved, profile) else ""
    checks = (
        smoke_checks.no_strays(strays),
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        smoke_checks.drift_check(moved, profile, where),
        smoke_checks.greedy_check(agreement, settings.greedy_tokens),
    )
    document = {"engine": engine, "checks": [one.as_dict() for one in checks], **moved.as_dict()}
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    log.info("smoke_eval: mean KL %.2e in %s", moved.mean_kl, engine)
    notes = {"engine": engine, "settings": asdict(settings)}
    return StageReport("report", checks, {}, notes, moved)


def _stops(served: Path) -> list[int]:
    """Ids that the served folder says end a text."""
    said = read_json(served / "generation_config.json").get("eos_token_id")
    return list(said) if isinstance(said, list) else [] if said is None else [int(said)]
