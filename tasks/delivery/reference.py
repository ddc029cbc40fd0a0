"""The reference of a delivery, which the smoke test compares the served folder with.

A delivery has no live training engine. For an adapter the reference is base + adapter, unmerged, in
peft; for a full model it is the model of SOURCE, gathered if needed. Drift from this reference
checks gather, merge, convert and the engine. It does not check training. It is measured on built-in
texts, or on the lines of a file.

Reward models are compared by reward, normalised with mean and standard deviation from the model's
files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ConfigError, DataError
from tasks.drift.fingerprint import DriftLimit, Fingerprint, ScorePrint
from tasks.drift.verdict import KERNEL, Moved, print_in
from tasks.drift.witness import ALTERED
from tasks.evaluation.measuring import Measuring, against_engine
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.witness.plumbline_witness.prints import BASE, FINGERPRINT, SCORES

PROBE_TOKENS = 64
"""Maximum number of tokens of a probe, as in training's own fingerprint."""

SHORTEST = 2
"""Minimum number of tokens of a probe: one as context and one to score."""

BUILT_IN = Path(__file__).with_name("probe_texts.json")
"""Texts in several languages and formats; without their own, deliveries are measured on these."""


def probe_texts(path: str | None, count: int) -> list[str]:
    """Return the first `count` texts of a file, one a line, or of the built-in texts."""
    if path is None:
        texts: list[str] = json.loads(BUILT_IN.read_text(encoding="utf-8"))
        return texts[:count]
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"smoke.texts={path}: cannot be read: {error}") from error
    texts = [line for line in lines if line.strip()][:count]
    if not texts:
        raise ConfigError(f"smoke.texts={path}: no text in it", hint="smoke.texts=null")
    return texts


def encode_probes(
    scorer: ReferenceScorer, tokenizer: Path, texts: list[str], limit: int
) -> list[list[int]]:
    """Return the token ids of the texts with at least `SHORTEST` tokens."""
    tokens = scorer.encode_texts(tokenizer, texts, limit=limit)
    probes = [ids for ids in tokens if len(ids) >= SHORTEST]
    if not probes:
        raise DataError("no text has two tokens: nothing to measure on", hint="smoke.texts=<file>")
    return probes


def reference(
    out: Path,
    *,
    model: Path,
    tokenizer: Path,
    texts: list[str],
    limit: int,  # tokens of a text, at most
    dtype: str,
    attn_implementation: str,
    quantization: Mapping[str, Any] | None,
    is_reward: bool,
    profile: DriftLimit,
    scorer: ReferenceScorer,
    log: Log,
    live: Path | None,  # folder of the live model's fingerprint or scores
    at_live: bool = False,  # True to measure at the live model's probes instead of the texts
    live_digest: str = "",  # part of the key
    adapter: Path | None = None,
) -> StageReport:
    """Take the fingerprint, or the rewards, of the model as SOURCE has it; a stage function.

    Fingerprints are taken in float32, with the noise of the formats that the model may be served
    in. Where training recorded its live model, SOURCE is also compared with that.
    """
    ref = ModelRef(model, adapter, quantization, dtype, attn_implementation)
    base = out / BASE if ref.adapter is not None else None
    drift: Moved | None = None
    checks: tuple[Check, ...] = ()
    if live is not None:
        folder = out if at_live and not is_reward else out / "witness"
        folder.mkdir(exist_ok=True)
        if is_reward:
            measuring = Measuring(scorer.measure, live, profile, attn_implementation, cause=ALTERED)
            drift, (check, *_) = measuring.take(ref, folder)
        else:
            cause, has_base = KERNEL if at_live else ALTERED, at_live and base is not None
            _, drift, check = against_engine(
                scorer, ref, print_in(live), folder, profile, base=has_base, cause=cause
            )
        checks = (check,)
        log.info("reference: %s: %s", check.name, check.found)
    probes = encode_probes(scorer, tokenizer, texts, limit)
    if is_reward:
        scores = scorer.rewards(ref, probes)
        ScorePrint(tuple(map(tuple, probes)), tuple(scores), "transformers").save(out / SCORES)
        log.info("reference: rewards of %d texts", len(probes))
        return StageReport("reference", checks, {"texts": float(len(probes))}, drift=drift)
    if not at_live:
        scorer.reference(ref, out / FINGERPRINT, probes=probes, base=base)
    fingerprint = Fingerprint.load(out / FINGERPRINT)
    count = len(fingerprint.probes)
    log.info("reference: %d positions of %d texts", fingerprint.positions, count)
    noise = {f"noise/{name}": noise.mean_kl for name, noise in fingerprint.formats.items()}
    metrics = {"positions": float(fingerprint.positions), **noise}
    return StageReport("reference", checks, metrics, drift=drift)
