"""Losses of training on data, and the table of objectives (`OBJECTIVES`).

A loss is a function of the model's output on one packed row. It sums over the row and divides by
counts of the whole step, so it does not matter which row, rank or accumulation step has an example.
Keyword arguments are the options of section `train.loss`, with their defaults.

Shapes: S sequences and N supervised tokens in a row; E examples, of one or two sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from tasks.training.tokens.rows import Row, Totals


class Output(NamedTuple):
    """Output of the model on one row, float32; an objective reads those that it needs."""

    logprobs: Any = None  # (N,) log-probabilities of the supervised tokens, in nats
    scores: Any = None  # (S,) scores of the sequences, by a model with a score head
    reference: Any = None  # (S,) sums of log-probabilities under the reference model
    baseline: Any = None  # scalar, mean log-ratio of KTO's mismatched answers over the whole step


class Loss(NamedTuple):
    """One row's part of the step's loss and metrics."""

    value: torch.Tensor  # scalar with gradient; the step's loss is the sum over all rows and ranks
    # metrics by name, scalars without gradient; added up in the same way
    measures: Mapping[str, torch.Tensor]


def sft(output: Output, row: Row, totals: Totals) -> Loss:
    """Return the mean cross-entropy in nats per supervised token."""
    return Loss(-output.logprobs.sum() / totals.supervised[0], {})


def reward(
    output: Output, row: Row, totals: Totals, *, margin: float = 0.0, center: float = 0.0
) -> Loss:
    """Return the mean over pairs of -log sigmoid(chosen - rejected - margin), in nats.

    Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1. A row's value `margin` is
    added to the margin of its pair; `center` weighs mean((chosen + rejected)^2), which keeps scores
    around zero (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).
    """
    chosen, rejected = output.scores.view(-1, 2).unbind(dim=1)
    gap = chosen - rejected
    losses = -logsigmoid(gap - margin - row.values.get("margin", torch.zeros_like(gap)))
    if center:
        losses = losses + center * (chosen + rejected).square()
    metrics = {"accuracy": (gap > 0).float(), "margin": gap, "chosen": chosen, "rejected": rejected}
    return _mean(losses, metrics, totals)


def dpo(
    output: Output,
    row: Row,
    totals: Totals,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    nll: float = 0.0,
) -> Loss:
    """Return the mean over pairs of a loss of d, the log-ratio of the chosen minus the rejected.

    -log sigmoid(beta d) for `kind=sigmoid`; (d' - 1 / (2 beta))^2 for `ipo`, where d' is the
    difference of the log-ratios per token.

    Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing (cDPO) Mitchell 2023. As TRL, and
    other than their papers: IPO takes means per token (Azar et al. 2023, arXiv:2310.12036, eq. 17:
    sums of a response), and the NLL is a mean over the chosen tokens of the step (Pang et al. 2024,
    arXiv:2404.19733, eq. 1: a mean over pairs, each divided by its own length).
    """
    sums = row.sums(output.logprobs)
    ratios = (sums - output.reference).view(-1, 2)
    if kind == "ipo":
        each = ratios / row.counts().view(-1, 2)
        losses = (each[:, 0] - each[:, 1] - 1 / (2 * beta)).square()
    else:
        gap, smooth = beta * (ratios[:, 0] - ratios[:, 1]), label_smoothing
        losses = -(1 - smooth) * logsigmoid(gap) - smooth * logsigmoid(-gap)
    return _of_pairs(losses, beta * ratios.detach(), sums, totals, nll=nll)


def simpo(
    output: Output,
    row: Row,
    totals: Totals,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    nll: float = 0.0,
) -> Loss:
    """Return the mean of -log sigmoid(beta * (difference of mean log-probabilities) - gamma).

    Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    sums = row.sums(output.logprobs)
    rewards = beta * (sums / row.counts()).view(-1, 2)
    losses = -logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma)
    return _of_pairs(losses, rewards, sums, totals, nll=nll)


def orpo(output: Output, row: Row, totals: Totals, *, beta: float = 0.1) -> Loss:
    """Return the mean cross-entropy of the chosen answers' tokens + beta * odds-ratio loss.

    Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7; `beta` is the paper's lambda.
    """
    sums = row.sums(output.logprobs)
    means = (sums / row.counts()).view(-1, 2)
    odds = means - _log1mexp(means)
    gap = odds[:, 0] - odds[:, 1]
    metrics = {"log_odds": gap}
    return _of_pairs(
        -logsigmoid(gap), beta * means, sums, totals, weight=beta, nll=1.0, more=metrics
    )


def kto(
    output: Output,
    row: Row,
    totals: Totals,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Return the mean over examples of weight * (1 - sigmoid(+-(beta * log-ratio - beta * z0))).

    The sign is + for desirable examples (value `desirable` 1), - for the others (0). z0 estimates
    the KL divergence of the policy from the reference: the mean log-ratio, over the whole step, of
    answers to the prompts of other examples (role `mismatched`). It is at least 0 and has no
    gradient. Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.
    """
    ratios = row.sums(output.logprobs) - output.reference
    z0 = output.baseline.clamp(min=0.0)
    good = row.values["desirable"] > 0.5
    sign = torch.where(good, 1.0, -1.0)
    weight = torch.where(good, desirable_weight, undesirable_weight)
    losses = weight * (1 - torch.sigmoid(sign * beta * (ratios - z0)))
    rewards = beta * ratios
    metrics = {
        "reward_desirable": rewards * good,
        "reward_undesirable": rewards * ~good,
        "share_desirable": good.float(),
        "kl": z0 * len(ratios),
    }
    return _mean(losses, metrics, totals)


def by_kind(totals: dict[str, float]) -> dict[str, float]:
    """Return KTO's rewards as means over their own kind of example; NaN if there is none."""
    good = totals["share_desirable"]
    shares = {"reward_desirable": good, "reward_undesirable": 1 - good}
    means = {
        name: totals[name] / share if share > 1e-9 else math.nan for name, share in shares.items()
    }
    return totals | means


def _mean(losses: torch.Tensor, metrics: Mapping[str, torch.Tensor], totals: Totals) -> Loss:
    """Return a row's part of the means over all examples of the step, from values of examples."""
    means = {name: each.detach().sum() / totals.examples for name, each in metrics.items()}
    return Loss(losses.sum() / totals.examples, means)


def _of_pairs(
    losses: torch.Tensor,
    rewards_E2: torch.Tensor,
    sums_S: torch.Tensor,
    totals: Totals,
    *,
    weight: float = 1.0,
    nll: float = 0.0,
    more: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Loss:
    """Return weight * mean of losses + nll * cross-entropy of the chosen answers' tokens.

    Metrics are implicit rewards and log-probabilities in nats, and those in `more`.
    """
    (chosen, rejected), logps = rewards_E2.unbind(dim=1), sums_S.view(-1, 2)
    metrics = {
        "accuracy": (chosen > rejected).float(),
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logp_chosen": logps[:, 0],
        "logp_rejected": logps[:, 1],
        **more,
    }
    value = weight * losses.sum() / totals.examples
    if nll:
        value = value - nll * logps[:, 0].sum() / totals.supervised[0]
    return Loss(value, _mean(losses, metrics, totals).measures)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate near 0 and far from it (Maechler 2012)."""
    x = x.clamp(max=-1e-7)
    near = torch.log(-torch.expm1(x.clamp(min=-0.6931)))
    far = torch.log1p(-torch.exp(x.clamp(max=-0.6931)))
    return torch.where(x > -0.6931, near, far)


@dataclass(frozen=True)
class Objective:
    """A loss and what it needs."""

    loss: Callable[..., Loss]  # of `Output`, `Row` and `Totals`
    roles: tuple[str, ...] = ("text",)  # names of an example's sequences
    head: str = "tokens"  # `score` for a model with a score head of one label
    needs_reference: bool = False  # True if the loss reads `Output.reference`
    # role whose sequences give `Output.baseline`, or None; they are not trained on
    baseline_role: str | None = None
    # returns the metrics of a step from their sums over all rows and ranks
    means: Callable[[dict[str, float]], dict[str, float]] = dict

    @property
    def trained(self) -> list[int]:
        """Numbers of the roles that are trained on."""
        return [i for i, role in enumerate(self.roles) if role != self.baseline_role]


_PAIR = ("chosen", "rejected")
OBJECTIVES = {
    "sft": Objective(sft),
    "reward": Objective(reward, _PAIR, head="score"),
    "dpo": Objective(dpo, _PAIR, needs_reference=True),
    "orpo": Objective(orpo, _PAIR),
    "simpo": Objective(simpo, _PAIR),
    "kto": Objective(kto, ("text", "mismatched"), "tokens", True, "mismatched", by_kind),
}


def objective(name: str, options: Mapping[str, Any]) -> Objective:
    """Return an objective with its options set; None leaves an option at its default."""
    chosen = OBJECTIVES[name]
    options = {key: value for key, value in options.items() if value is not None}
    return replace(chosen, loss=partial(chosen.loss, **options))
