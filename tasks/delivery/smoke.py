"""The reference of a delivery, and the smoke test that compares the served folder with it.

A delivery has no live training engine. For an adapter the reference is base + adapter, unmerged, in
peft; for a full model it is the model of SOURCE, gathered if needed. Drift from this reference
checks gather, merge, convert and the engine. It does not check training.

Reward models are compared by reward, normalised with mean and standard deviation from the model's
files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.delivery.texts import encode_probes
from tasks.drift.fingerprint import PROFILES, Fingerprint
from tasks.drift.reward_scores import SCORES, ScorePrint, score_drift
from tasks.drift.verdict import (
    BASE,
    FINGERPRINT,
    KERNEL,
    Moved,
    advice,
    engine_verdict,
    print_in,
    verdict,
)
from tasks.drift.witness import ALTERED
from tasks.evaluation.planned import Measuring
from tasks.evaluation.scoring import ModelRef, Prompts, ReferenceScorer
from tasks.evaluation.serve import Question
from tasks.evaluation.smoke import SmokeTest, smoke_test, take_fields
from tasks.pipeline.report import StageReport
from tasks.serving.prompts import stop_ids
from tasks.serving.reference.rewards import normalised
from tasks.weights.files.reader import read_json
from tasks.weights.heads import normalisation_from


@dataclass(frozen=True)
class ReferenceSettings:
    """Texts that a reference is measured on, and how to load its model.

    Attributes:
        texts: texts to measure on.
        limit: maximum number of tokens of a text.
        dtype: torch dtype name to load the model in.
        attn_implementation: attention, by transformers' name.
        quantization: quantization of the base, as `ModelRef.quantization`.
        weights: weights of several adapters by role; empty for one adapter with weight 1.
        is_reward: True for a reward model, which is compared by reward.
        profile: name of the drift profile.
        live: SHA-256 of the live model's fingerprint or scores; empty if there are none.
        at_live: True to measure at the live model's probes and ids instead of the texts.
    """

    texts: list[str]
    limit: int
    dtype: str
    attn_implementation: str
    quantization: Mapping[str, Any] | None
    weights: Mapping[str, float]
    is_reward: bool
    profile: str
    live: str = ""
    at_live: bool = False


def reference(
    out: Path,
    *,
    model: Path,
    tokenizer: Path,
    scorer: ReferenceScorer,
    log: Any,
    live: Path | None,
    **others: Any,
) -> StageReport:
    """Take the fingerprint, or the rewards, of the model as SOURCE has it; a stage function.

    Fingerprints are taken in float32, with the noise of the formats that the model may be served
    in. Where training recorded its live model, SOURCE is also compared with that.

    Args:
        out: staging directory; gets `fingerprint.fp` (of adapters also `base.fp`) or `scores.json`.
        model: folder of a full model, or of the base of the adapters.
        tokenizer: folder of the tokenizer.
        scorer: the transformers child.
        log: gets progress.
        live: folder with the live model's fingerprint or scores; None if there is none.
        **others: fields of `ReferenceSettings`, and PEFT folders by role, the first as `adapter`,
            which stay unmerged.

    Raises:
        DataError: all texts are too short.
    """
    settings = take_fields(ReferenceSettings, others)
    weighted = {str(others[role]): weight for role, weight in settings.weights.items()}
    ref = ModelRef(
        model,
        others.get("adapter"),
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
        _print(probes, scorer.rewards(ref, probes), "transformers").save(out / SCORES)
        log.info("reference: rewards of %d texts", len(probes))
        return StageReport("reference", checks, {"texts": float(len(probes))}, drift=drift)
    if not settings.at_live:
        base = out / BASE if ref.adapter is not None else None
        scorer.reference(ref, out / FINGERPRINT, probes=probes, base=base)
    fingerprint = Fingerprint.load(out / FINGERPRINT)
    count = len(fingerprint.probes)
    log.info("reference: %d positions of %d texts", fingerprint.positions, count)
    if advised := advice(fingerprint):
        log.info("reference: %s", advised)
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


@smoke_test
def smoke(test: SmokeTest, out: Path) -> StageReport:
    """Serve the folder, and compare fingerprint and greedy tokens on the reference's probes.

    Args:
        test: the common arguments.
        out: staging directory; gets `report.json`, `fingerprint.fp`.

    Raises:
        StageProcessError: the engine did not start or crashed.
    """
    path = test.trained / FINGERPRINT
    probes = [list(probe) for probe in Fingerprint.load(path).probes]
    prompts = Prompts(probes, stop_ids(test.served, None))
    question = Question(
        served=test.served,
        base=None,
        reference=path,
        chats=None,
        prompts=prompts,
        base_prompts=prompts,
        dtype=test.model.dtype,
        attn_implementation=test.attn_implementation,
    )
    measured = test.measure(question, out)
    test.log.info("smoke_eval: mean KL %.2e in %s", measured.drift.mean_kl, test.engine)
    return test.report(out, measured.checks, {}, measured.drift, measured.notes)


@smoke_test
def reward_smoke(test: SmokeTest, out: Path) -> StageReport:
    """Serve the folder, score the reference's texts, and compare the rewards.

    Args:
        test: the common arguments.
        out: staging directory; gets `report.json`, `scores.json`.

    Raises:
        StageProcessError: the engine did not start or crashed.
    """
    before = ScorePrint.load(test.trained / SCORES)
    probes = [list(probe) for probe in before.probes]
    how = normalisation_from(read_json(test.served / "config.json"), f"{test.served}/config.json")
    now = _print(probes, normalised(test.scores(probes, out), how), test.engine)
    now.save(out / SCORES)
    moved = score_drift(before, now)
    check = verdict(moved, test.profile, name="rewards against those before")
    checks = (test.located(check, probes),)
    test.log.info("smoke_eval: rewards move by %.2e of their spread", moved.mean_difference)
    metrics = {f"reward/{name}": value for name, value in asdict(moved).items()}
    return test.report(out, checks, metrics, moved)


def _print(probes: Sequence[Sequence[int]], scores: list[float], engine: str) -> ScorePrint:
    return ScorePrint(tuple(map(tuple, probes)), tuple(scores), engine)
