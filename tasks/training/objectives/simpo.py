"""SimPO: preference pairs by mean log-probability, without a reference model.

Meng et al. 2024, arXiv:2405.14734, eq. 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import logsigmoid

from tasks.training.objectives import Loss, ModelOutput, Objective
from tasks.training.objectives.dpo import measures
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Simpo(Objective):
    """Mean over pairs of -log sigmoid(beta * (difference of mean log-probabilities) - gamma).

    Attributes:
        beta: scale of the rewards, 2.0 to 10.0 in the paper.
        gamma: target margin between the rewards of the chosen and the rejected answer.
        nll: weight of the mean cross-entropy per token of the chosen answers (CPO-SimPO).
    """

    beta: float = 2.0
    gamma: float = 1.0
    nll: float = 0.0
    roles: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the sum over the row's pairs, divided by the pairs of the step."""
        assert output.logprobs is not None
        sums = row.sums(output.logprobs)
        rewards = self.beta * (sums / row.counts()).view(-1, 2)
        losses = -logsigmoid(rewards[:, 0] - rewards[:, 1] - self.gamma)
        value = losses.sum() / counts.examples
        if self.nll:
            value = value - self.nll * sums[0::2].sum() / counts.supervised[0]
        return Loss(value, measures(rewards.detach(), sums.detach(), counts))
