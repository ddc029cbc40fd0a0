"""Mean and standard deviation of a reward model's scores over the held-out answers.

They make scores of different models comparable, and are what PPO divides rewards by. Measured on
the state that is handed on, over chosen and rejected answers alike.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from tasks.core.errors import TrainingError
from tasks.training.job import Batch
from tasks.training.objectives.forward_passes import Passes
from tasks.training.tokens.examples import Examples


@dataclass(frozen=True)
class HeldOutScores:
    """Of `count` raw scores; `std` is that of the population."""

    mean: float
    std: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


def heldout_scores(passes: Passes, examples: Examples, batch: Batch) -> HeldOutScores:
    """Score every held-out answer. All ranks take part.

    Args:
        passes: with an engine around a model with a score head.
        examples: held-out.
        batch: sizes of the run's rows.

    Raises:
        TrainingError: scores that are not finite, or all the same.
    """
    ranks = passes.ranks
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    for _, raw, counted in passes.each(examples, batch):
        scores = raw.double()
        if counted:
            ones = torch.ones_like(scores).sum()
            sums += torch.stack([scores.sum(), scores.square().sum(), ones])
    total, squares, count = ranks.total(sums).tolist()
    mean = total / count
    variance = squares / count - mean**2
    if not math.isfinite(variance) or variance <= 0:
        raise TrainingError(
            f"the reward model's scores on {count:.0f} held-out answers have mean {mean:g} and "
            f"variance {variance:g}: it tells nothing apart",
            hint="train longer, with another train.lr, or look at the data",
        )
    return HeldOutScores(mean, math.sqrt(variance), int(count))
