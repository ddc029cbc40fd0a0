"""Preference pairs against a reference model: DPO, its conservative form, IPO, and DPO + NLL.

Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing (cDPO) Mitchell 2023; IPO Azar et al.
2023, arXiv:2310.12036, eq. 17; NLL on the chosen answer Pang et al. 2024, arXiv:2404.19733, eq. 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from tasks.core.errors import ConfigError
from tasks.training.objectives import Loss, Said
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row

KINDS = ("sigmoid", "ipo")


@dataclass(frozen=True)
class Dpo:
    """Mean over pairs of a loss of the difference of log-ratios, in nats (IPO: squared).

    Attributes:
        kind: `sigmoid` is -log sigmoid(beta * difference); `ipo` is the square of the difference of
            ratios *per token* from 1 / (2 beta).
        beta: how far the policy may leave the reference.
        label_smoothing: share of pairs whose labels are taken to be wrong (0 to 0.5), cDPO.
        nll: weight of the chosen answers' mean cross-entropy a token.
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    nll: float = 0.0
    roles: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    head: ClassVar[str] = "tokens"
    needs_reference: ClassVar[bool] = True
    baseline_role: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Refuse knobs that make no loss."""
        if self.kind not in KINDS:
            raise ConfigError(
                f"train.loss.kind={self.kind} is not a kind of train.objective=dpo",
                hint=f"train.loss.kind={'|'.join(KINDS)}",
            )
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"train.loss.label_smoothing={self.label_smoothing} is not within 0 and 0.5",
                hint="0.1 takes one label in ten to be wrong",
            )

    def loss(self, said: Said, row: Row, counts: Counts) -> Loss:
        """The row's pairs over the step's pairs."""
        assert said.logprobs is not None
        assert said.reference is not None
        sums = row.sums(said.logprobs)
        ratios = (sums - said.reference).view(-1, 2)
        losses = self._ipo(ratios, row) if self.kind == "ipo" else self._sigmoid(ratios)
        value = losses.sum() / counts.examples
        if self.nll:
            value = value - self.nll * sums[0::2].sum() / counts.supervised[0]
        return Loss(value, measures(self.beta * ratios.detach(), sums.detach(), counts))

    def _sigmoid(self, ratios_E2: torch.Tensor) -> torch.Tensor:
        gap = self.beta * (ratios_E2[:, 0] - ratios_E2[:, 1])
        smooth = self.label_smoothing
        return -(1 - smooth) * logsigmoid(gap) - smooth * logsigmoid(-gap)

    def _ipo(self, ratios_E2: torch.Tensor, row: Row) -> torch.Tensor:
        each = ratios_E2 / row.counts().view(-1, 2)
        return (each[:, 0] - each[:, 1] - 1 / (2 * self.beta)).square()


def measures(
    rewards_E2: torch.Tensor, sums_S: torch.Tensor, counts: Counts
) -> dict[str, torch.Tensor]:
    """The usual measures of preference pairs, as this row's part of the step's mean.

    Args:
        rewards_E2: implicit rewards of chosen and rejected answers.
        sums_S: their log-probabilities under the policy.
        counts: of the whole step.
    """
    chosen, rejected = rewards_E2.unbind(dim=1)
    found = {
        "accuracy": (chosen > rejected).float().sum(),
        "margin": (chosen - rejected).sum(),
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "logp_chosen": sums_S[0::2].sum(),
        "logp_rejected": sums_S[1::2].sum(),
    }
    return {name: value / counts.examples for name, value in found.items()}
