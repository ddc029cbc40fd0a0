"""Fingerprint of a reward model: its scores on a fixed set of probe texts.

This is the counterpart of `tasks/drift/fingerprint.py` for models that return one number per text.
The first scores come from the live training engine; every hand-off measures them again on the same
token ids. `reward_drift.py` compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError, DriftError
from tasks.drift.reward_drift import RewardDrift, reward_drift

SCORES = "scores.json"


@dataclass(frozen=True)
class ScorePrint:
    """Scores of one model on the probes.

    Attributes:
        probes: P token-id sequences; a score is taken at the last token of each.
        scores: P raw outputs of the head, not normalised.
        engine: engine that measured them ("deepspeed", "transformers", "vllm").
        noise: mean absolute difference between two measurements of the same model by the same
            engine with different batching, in scores; None if it was not measured.
        measured_on: `machine.measured_on` of the engine; None if unknown.
    """

    probes: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    engine: str
    noise: float | None = None
    measured_on: Mapping[str, str] | None = None

    def save(self, path: Path) -> None:
        """Write JSON, which preserves every bit of a float32."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> ScorePrint:
        """Read a file of `save`. Raises ArtifactError if it has no scores."""
        try:
            raw = json.loads(path.read_text())
            return cls(
                probes=tuple(tuple(int(i) for i in probe) for probe in raw["probes"]),
                scores=tuple(float(score) for score in raw["scores"]),
                engine=str(raw["engine"]),
                noise=raw.get("noise"),
                measured_on=raw.get("measured_on"),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} does not hold scores: {error}") from error


def score_drift(reference: ScorePrint, new: ScorePrint) -> RewardDrift:
    """Return the drift of `new` from `reference`.

    Raises:
        DriftError: the probes differ, or a score is not finite.
        DataError: the reference gives every probe the same score, which has no scale.
    """
    if reference.probes != new.probes:
        raise DriftError("scores are not comparable: they are of other texts")
    return reward_drift(reference.scores, new.scores)
