"""The reference of a delivery, which the smoke test compares the served folder with.

A delivery has no live training engine. For an adapter the reference is base + adapter, unmerged, in
peft; for a full model it is the model of SOURCE, gathered if needed. Drift from this reference
checks gather, merge, convert and the engine. It does not check training. It is measured on built-in
texts, or on the lines of a file.

Reward models are compared by reward, normalised with mean and standard deviation from the model's
files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ConfigError, DataError
from tasks.drift.fingerprint import PROFILES, Fingerprint, ScorePrint
from tasks.drift.verdict import KERNEL, Moved, engine_verdict, print_in
from tasks.drift.witness import ALTERED
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.report import StageReport
from tasks.process.output import Log
from tasks.witness.plumbline_witness.prints import BASE, FINGERPRINT, SCORES

PROBE_TOKENS = 64
"""Maximum number of tokens of a probe, as in training's own fingerprint."""

SHORTEST = 2
"""Minimum number of tokens of a probe: one as context and one to score."""

BUILT_IN = (
    "The capital of France is Paris, and the capital of Italy is",
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "To be, or not to be, that is the question:",
    "Question: What is 17 times 23?\nAnswer: 17 times 23 is",
    "Dear Sir or Madam,\n\nI am writing to ask about",
    '{"name": "Ada", "born": 1815, "known_for": ["the first',
    "Der Zug nach Hamburg fährt heute von Gleis",
    "La lumière du soleil met environ huit minutes à",
    "Once upon a time there was a small fox who lived at the edge of",
    "SELECT customer_id, SUM(amount) FROM orders GROUP BY",
    "The derivative of sin(x) is cos(x), and the derivative of cos(x) is",
    "Ingredients: two eggs, a cup of flour, a pinch of salt. First, whisk",
    "In 1969 two people walked on the Moon for the first time;",
    "for (int i = 0; i < n; i++) {\n    total += values[i];\n}\nreturn",
    "今日はとても天気がいいので、",
    "El perro corre por el parque mientras la niña",
    "User: How do I reset my password?\nAssistant: Open the settings and",
    "A prime number has exactly two divisors; the first five are 2, 3, 5,",
    "Error: connection refused. The most likely reason is that the server",
    "The opposite of hot is cold, the opposite of tall is",
    "人工智能的发展",
    "Translate to German: Good morning, how are you? ->",
    "Photosynthesis turns light, water and carbon dioxide into",
    "<html>\n<head><title>Example</title></head>\n<body>",
    "She opened the letter, read it twice, and then",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "The three laws of thermodynamics can be summed up as follows:",
    "Привет! Меня зовут",
    "git commit -m 'Fix the off-by-one error in",
    "Because the bridge was closed, the bus had to",
    "In summary, the results show that",
)


def probe_texts(path: str | None, count: int) -> list[str]:
    """Return the first `count` texts of a file, one a line, or of the built-in texts."""
    if path is None:
        return list(BUILT_IN[:count])
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


@dataclass(frozen=True)
class ReferenceSettings:
    """Texts that a reference is measured on, and how to load its model."""

    texts: list[str]
    limit: int  # tokens of a text, at most
    dtype: str
    attn_implementation: str
    quantization: Mapping[str, Any] | None
    # weights of several adapters by role; empty for one adapter with weight 1
    weights: Mapping[str, float]
    is_reward: bool
    profile: str
    live: str = ""  # SHA-256 of the live model's fingerprint or scores; empty if there are none
    at_live: bool = False  # True to measure at the live model's probes and ids instead of the texts


def reference(
    out: Path,
    *,
    model: Path,
    tokenizer: Path,
    settings: ReferenceSettings,
    scorer: ReferenceScorer,
    log: Log,
    live: Path | None,
    **adapters: Path,
) -> StageReport:
    """Take the fingerprint, or the rewards, of the model as SOURCE has it; a stage function.

    Fingerprints are taken in float32, with the noise of the formats that the model may be served
    in. Where training recorded its live model, SOURCE is also compared with that.
    """
    weighted = {str(adapters[role]): weight for role, weight in settings.weights.items()}
    ref = ModelRef(
        model,
        adapters.get("adapter"),
        settings.quantization,
        settings.dtype,
        settings.attn_implementation,
        weighted,
    )
    drift: Moved | None = None
    checks: tuple[Check, ...] = ()
    if live is not None:
        drift, check = _against_live_model(ref, print_in(live), settings, scorer, out)
        checks = (check,)
        log.info("reference: %s: %s", check.name, check.found)
    probes = encode_probes(scorer, tokenizer, settings.texts, settings.limit)
    if settings.is_reward:
        scores = scorer.rewards(ref, probes)
        texts = tuple(map(tuple, probes))
        ScorePrint(texts, tuple(scores), "transformers").save(out / SCORES)
        log.info("reference: rewards of %d texts", len(probes))
        return StageReport("reference", checks, {"texts": float(len(probes))}, drift=drift)
    if not settings.at_live:
        base = out / BASE if ref.adapter is not None else None
        scorer.reference(ref, out / FINGERPRINT, probes=probes, base=base)
    fingerprint = Fingerprint.load(out / FINGERPRINT)
    count = len(fingerprint.probes)
    log.info("reference: %d positions of %d texts", fingerprint.positions, count)
    noise = {f"noise/{name}": noise.mean_kl for name, noise in fingerprint.formats.items()}
    metrics = {"positions": float(fingerprint.positions), **noise}
    return StageReport("reference", checks, metrics, drift=drift)


def _against_live_model(
    ref: ModelRef, live: Path, settings: ReferenceSettings, scorer: ReferenceScorer, out: Path
) -> tuple[Moved, Check]:
    """Measure SOURCE on the live model's probes. Returns the drift and its verdict."""
    folder, limit = out / "witness", PROFILES[settings.profile]
    if settings.is_reward:
        folder.mkdir()
        attention = settings.attn_implementation
        measuring = Measuring(scorer.measure, live.parent, limit, attention, cause=ALTERED)
        drift, (check, *_) = measuring.take(ref, folder)
        return drift, check
    recorded = Fingerprint.load(live)
    base = None
    if settings.at_live:
        folder, base = out, out / BASE if ref.adapter is not None else None
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary) / FINGERPRINT
        exact = scorer.reference(ref, folder / FINGERPRINT, like=live, own=own, base=base)
        cause = KERNEL if settings.at_live else ALTERED
        return engine_verdict(exact, recorded, limit, Fingerprint.load(own), cause)
