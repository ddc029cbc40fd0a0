"""KTO: answers marked as desirable or not. Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from tasks.training.objectives import Loss, ModelOutput, Objective
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row


@dataclass(frozen=True)
class Kto(Objective):
    """Mean over examples of weight * (1 - sigmoid(+-(beta * log-ratio - beta * z0))).

    The sign is + for desirable examples (value `desirable` 1), - for the others (0). z0 estimates
    the KL divergence of the policy from the reference: the mean log-ratio, over the whole step, of
    answers to the prompts of other examples (role `mismatched`). It is at least 0 and has no
    gradient.

    Attributes:
        beta: strength of the pull towards the reference.
        desirable_weight: weight of the desirable examples.
        undesirable_weight: weight of the undesirable examples. The sums of both weights over the
            examples should differ by at most a factor of 4/3 (sec. 4.2).
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    roles: ClassVar[tuple[str, ...]] = ("text", "mismatched")
    needs_reference: ClassVar[bool] = True
    baseline_role: ClassVar[str | None] = "mismatched"

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the sum over the row's examples, divided by the examples of the step."""
        assert output.logprobs is not None
        assert output.reference is not None
        assert output.baseline is not None
        ratios = row.sums(output.logprobs) - output.reference
        z0 = output.baseline.clamp(min=0.0)
        good = row.values["desirable"] > 0.5
        sign = torch.where(good, 1.0, -1.0)
        weight = torch.where(good, self.desirable_weight, self.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(sign * self.beta * (ratios - z0)))
        rewards = self.beta * ratios.detach()
        measures = {
            "reward_desirable": (rewards * good).sum(),
            "reward_undesirable": (rewards * ~good).sum(),
            "share_desirable": good.float().sum(),
            "kl": z0 * len(ratios),
        }
        return Loss(
            losses.sum() / counts.examples,
            {name: value / counts.examples for name, value in measures.items()},
        )

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the rewards as means over their own kind of example; NaN if there is none."""
        good = totals["share_desirable"]
        shares = {"reward_desirable": good, "reward_undesirable": 1 - good}
        means = {
            name: totals[name] / share if share > 1e-9 else math.nan
            for name, share in shares.items()
        }
        return totals | means
