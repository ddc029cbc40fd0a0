"""Reward modelling: train the chosen answer to score above the rejected one.

Bradley and Terry 1952; as a loss on a score head Ouyang et al. 2022, arXiv:2203.02155, eq. 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from tasks.training.objectives import Loss, ModelOutput, Objective
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Reward(Objective):
    """Mean over pairs of -log sigmoid(d), d = chosen - rejected - margin, in nats.

    Attributes:
        margin: margin of every pair; an example's own value `margin` is added to it.
        center: weight of mean((chosen + rejected)^2), which keeps scores around zero (Eisenstein
            et al. 2023, arXiv:2312.09244, eq. 2).
    """

    margin: float = 0.0
    center: float = 0.0
    roles: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    head: ClassVar[str] = "score"

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the sum over the row's pairs, divided by the pairs of the step."""
        assert output.scores is not None
        chosen, rejected = output.scores.view(-1, 2).unbind(dim=1)
        gap = chosen - rejected
        wanted = gap - self.margin - row.values.get("margin", torch.zeros_like(gap))
        losses = -logsigmoid(wanted)
        if self.center:
            losses = losses + self.center * (chosen + rejected).square()
        measures = {
            "accuracy": (gap > 0).float().sum(),
            "margin": gap.sum(),
            "chosen": chosen.sum(),
            "rejected": rejected.sum(),
        }
        return Loss(
            losses.sum() / counts.examples,
            {name: value.detach() / counts.examples for name, value in measures.items()},
        )
