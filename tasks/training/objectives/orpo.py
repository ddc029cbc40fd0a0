"""ORPO: cross-entropy of the chosen answer and a log odds ratio, without a reference model.

Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from tasks.training.objectives import Loss, ModelOutput, Objective
from tasks.training.objectives.dpo import measures
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Orpo(Objective):
    """Mean cross-entropy of the chosen answers' tokens + beta * mean odds-ratio loss over pairs.

    Attributes:
        beta: weight of the odds-ratio loss (the paper's lambda).
    """

    beta: float = 0.1
    roles: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the row's part: tokens divided by the step's chosen tokens, pairs by its pairs."""
        assert output.logprobs is not None
        sums = row.sums(output.logprobs)
        means = (sums / row.counts()).view(-1, 2)
        odds = means - _log1mexp(means)
        losses = -logsigmoid(odds[:, 0] - odds[:, 1])
        nll = -sums[0::2].sum() / counts.supervised[0]
        metrics = measures(self.beta * means.detach(), sums.detach(), counts)
        metrics["log_odds"] = (odds[:, 0] - odds[:, 1]).detach().sum() / counts.examples
        return Loss(nll + self.beta * losses.sum() / counts.examples, metrics)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate near 0 and far from it (Maechler 2012)."""
    x = x.clamp(max=-1e-7)
    near = torch.log(-torch.expm1(x.clamp(min=-0.6931)))
    far = torch.log1p(-torch.exp(x.clamp(max=-0.6931)))
    return torch.where(x > -0.6931, near, far)
