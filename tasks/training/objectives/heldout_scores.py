"""Mean and standard deviation of a reward model's scores on the evaluation examples.

They make the scores of different models comparable, and PPO normalises rewards with them. They are
measured on the final weights, over chosen and rejected answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tasks.core.errors import TrainingError
from tasks.training.job import Batch
from tasks.training.objectives.forward_passes import Passes
from tasks.training.tokens.examples import Examples


@dataclass(frozen=True)
class HeldOutScores:
    """Statistics of `count` raw scores; `std` is the population's standard deviation."""

    mean: float
    std: float
    count: int


def heldout_scores(passes: Passes, examples: Examples, batch: Batch) -> HeldOutScores:
    """Score every answer of the evaluation examples. All ranks take part.

    Args:
        passes: forward passes of a model with a score head.
        examples: evaluation examples.
        batch: batch sizes of the run.

    Raises:
        TrainingError: scores are not finite, or all equal.
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
            f"variance {variance:g}: it does not distinguish them",
            hint="train longer, with another train.lr, or look at the data",
        )
    return HeldOutScores(mean, math.sqrt(variance), int(count))
