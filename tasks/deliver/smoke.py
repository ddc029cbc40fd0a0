"""The reference of a delivery, and the served folder beside it in the engine that will serve it.

No training engine is there to ask. For an adapter the reference is base + adapter through peft in
transformers, unmerged; for a full model it is the model as SOURCE (or its gathering) has it. Drift
from there proves gather, merge, convert and the server, and it proves nothing about training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.contract import Check
from tasks.deliver.texts import PROBE_TOKENS
from tasks.errors import DataError
from tasks.fingerprint import DriftLimit, Fingerprint, drift, within
from tasks.handoff import FINGERPRINT
from tasks.launch import launch, python_child
from tasks.report import StageReport
from tasks.scoring import ModelRef, ReferenceScorer
from tasks.serving import verdicts
from tasks.serving.job import Job, environment
from tasks.serving.ties import compare_greedy, engine_noise
from tasks.weights.reader import read_json

HEADROOM = 8
"""Tokens that `max_model_len` has beyond the longest probe, when it is chosen here."""
SHORTEST = 2
"""Tokens of a probe: one to start from and one to score."""


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is run. See `tasks/deliver/schema.py`."""

    greedy_tokens: int = 5
    kv_cache_gib: int = 1
    max_model_len: int | None = None
    timeout_s: float = 900.0
    threads: int | None = None


def reference(
    out: Path,
    *,
    model: Path,
    texts: list[str],
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
    tokens = scorer.encode_texts(tokenizer, texts, limit=PROBE_TOKENS)
    probes = [one for one in tokens if len(one) >= SHORTEST]
    if not probes:
        raise DataError("no text has two tokens: nothing to measure on", hint="smoke.texts=<file>")
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
    strays = verdicts.stray_weights(served)
    if strays:
        return StageReport("report", (verdicts.no_strays(strays),))
    before = Fingerprint.load(reference / FINGERPRINT)
    dtype = str(read_json(served / "config.json").get("dtype", "bfloat16"))
    model = ModelRef(served, dtype=dtype, attn_implementation=attn_implementation)
    prompts = [list(probe) for probe in before.probes]
    expected = scorer.greedy(
        model, prompts, max_new_tokens=settings.greedy_tokens, eos=_stops(served)
    )
    if engine == "vllm":
        job = _job(out, served, reference, prompts, dtype, settings)
        tokens = _vllm(job, settings, log, log_path)
        after = Fingerprint.load(out / FINGERPRINT)
    else:
        after = scorer.fingerprint(model, reference / FINGERPRINT, out / FINGERPRINT)
        tokens = expected.tokens
    moved = drift(before, after)
    noise = engine_noise(before, after)
    agreement = compare_greedy(tokens, expected.tokens, expected.candidates, noise)
    where = f"{engine}, of the folder that convert made" if within(moved, profile) else ""
    checks = (
        verdicts.no_strays(strays),
        Check("engine", f"{engine} loads the model", "loaded", ok=True),
        verdicts.drift_check(moved, profile, where),
        verdicts.greedy_check(agreement, settings.greedy_tokens),
    )
    document = {"engine": engine, "checks": [asdict(one) for one in checks], **moved.as_dict()}
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    log.info("smoke_eval: mean KL %.2e in %s", moved.mean_kl, engine)
    notes = {"engine": engine, "settings": asdict(settings)}
    return StageReport("report", checks, {}, notes, moved)


def _stops(served: Path) -> list[int]:
    """Ids that the served folder says end a text."""
    said = read_json(served / "generation_config.json").get("eos_token_id")
    return list(said) if isinstance(said, list) else [] if said is None else [int(said)]


def _job(
    out: Path,
    served: Path,
    reference: Path,
    prompts: list[list[int]],
    dtype: str,
    settings: EngineSettings,
) -> Job:
    longest = max(len(prompt) for prompt in prompts) + settings.greedy_tokens
    return Job(
        served=str(served),
        out=str(out),
        prompts=prompts,
        max_new_tokens=settings.greedy_tokens,
        max_model_len=settings.max_model_len or longest + HEADROOM,
        reference=str(reference / FINGERPRINT),
        dtype=dtype,
    )


def _vllm(job: Job, settings: EngineSettings, log: Any, log_path: Path) -> list[list[int]]:
    """The engine's greedy tokens; its fingerprint is left in the job's folder."""
    out = Path(job.out)
    path = out / "job.json"
    job.save(path)
    launch(
        python_child("tasks.serving.vllm_child", str(path)),
        stage="smoke_eval",
        log=log,
        log_path=log_path,
        env=environment(settings.kv_cache_gib, settings.threads),
        timeout_s=settings.timeout_s,
    )
    result = out / "result.json"
    tokens: list[list[int]] = json.loads(result.read_text())["served"]["tokens"]
    path.unlink()
    result.unlink()
    return tokens
