"""What a reward model does: its scores on a fixed set of probe texts.

The counterpart of `tasks/drift/fingerprint.py` for models that answer with one number a text. First
taken from the live training engine, re-taken after every hand-off on the same token ids. Scores
have no scale of their own, so that distances are stated in standard deviations of the reference's
scores.
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
        engine: who measured them ("deepspeed", "transformers", "vllm").
        noise: mean absolute difference between two measurements of the same model by the same
            engine with different batching, in scores; None where it was not measured.
        measured_on: `machine.measured_on` of the engine; None where it is not known.
    """

    probes: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    engine: str
    noise: float | None = None
    measured_on: Mapping[str, str] | None = None

    def save(self, path: Path) -> None:
        """Write as JSON; a float32 comes back as it was."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> ScorePrint:
        """Read what `save` wrote. Raises ArtifactError when the file does not hold scores."""
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
    """How far `new` lies from `reference`.

    Raises:
        DriftError: other probes, or scores that are not finite.
        DataError: a reference that gives every probe the same score, which has no scale.
    """
    if reference.probes != new.probes:
        raise DriftError("scores are not comparable: they are of other texts")
    return reward_drift(reference.scores, new.scores)
