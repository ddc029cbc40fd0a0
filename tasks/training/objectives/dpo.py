"""DPO, conservative DPO (cDPO), IPO and DPO + NLL: preference pairs against a reference model.

Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing (cDPO) Mitchell 2023. As TRL, and
other than their papers: IPO takes means per token (Azar et al. 2023, arXiv:2310.12036, eq. 17: sums
of a response), and the NLL is a mean over the chosen tokens of the step (Pang et al. 2024,
arXiv:2404.19733, eq. 1: a mean over pairs, each divided by its own length).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from tasks.core.errors import ConfigError
from tasks.training.objectives import Loss, ModelOutput, Objective
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row

KINDS = ("sigmoid", "ipo")


@dataclass(frozen=True)
class Dpo(Objective):
    """Mean over pairs of a loss of d, the log-ratio of the chosen answer minus the rejected one's.

    Attributes:
        kind: `sigmoid` is -log sigmoid(beta * d); `ipo` is (d' - 1 / (2 beta))^2, where d' is the
            difference of the log-ratios per token.
        beta: strength of the pull towards the reference.
        label_smoothing: assumed share of pairs with wrong labels, at least 0 and below 0.5 (cDPO).
        nll: weight of the mean cross-entropy over all chosen tokens; long answers weigh more.
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    nll: float = 0.0
    roles: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse invalid options."""
        if self.kind not in KINDS:
            raise ConfigError(
                f"train.loss.kind={self.kind} is not a kind of train.objective=dpo",
                hint=f"train.loss.kind={'|'.join(KINDS)}",
            )
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"train.loss.label_smoothing={self.label_smoothing} is not in 0 <= x < 0.5",
                hint="0.1 assumes that one label in ten is wrong",
            )

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return the sum over the row's pairs, divided by the pairs of the step."""
        assert output.logprobs is not None
        assert output.reference is not None
        sums = row.sums(output.logprobs)
        ratios = (sums - output.reference).view(-1, 2)
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
    """Return the usual metrics of preference pairs, as this row's part of the step's means.

    Args:
        rewards_E2: implicit rewards of the chosen and the rejected answers.
        sums_S: log-probabilities of the answers under the policy, in nats; S = 2 E.
        counts: totals of the whole step.
    """
    chosen, rejected = rewards_E2.unbind(dim=1)
    sums = {
        "accuracy": (chosen > rejected).float().sum(),
        "margin": (chosen - rejected).sum(),
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "logp_chosen": sums_S[0::2].sum(),
        "logp_rejected": sums_S[1::2].sum(),
    }
    return {name: value / counts.examples for name, value in sums.items()}
