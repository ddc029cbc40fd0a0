"""Every loss against its formula in float64, and rows against the whole step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tasks.training.losses import Objective, Output, objective
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import Row, Totals, pack

LENGTHS = [(5, 3), (9, 4), (2, 7), (6, 6), (3, 8), (4, 2)]
"""Supervised tokens of the two sequences of six examples; each begins with two that are not."""


def examples(roles: tuple[str, ...]) -> Examples:
    draw = np.random.default_rng(0)
    spans = [n for pair in LENGTHS for n in pair[: len(roles)]]
    bears = np.concatenate([np.r_[[0, 0], np.ones(n)] for n in spans]).astype(np.uint8)
    return Examples(
        roles=roles,
        names=tuple(f"e{i}" for i in range(len(LENGTHS))),
        ids=draw.integers(0, 50, len(bears)).astype(np.int32),
        bears=bears,
        bounds=np.r_[0, np.cumsum(np.array(spans) + 2)],
        values={
            "margin": draw.uniform(0, 1, len(LENGTHS)).astype(np.float32),
            "desirable": np.array([1, 0, 1, 1, 0, 0], np.float32),
        },
    )


def output_of(row: Row, chosen: Objective) -> Output:
    """Return random output that depends on the example, but not on its row."""

    def draw(kind: int, example: int, role: int, count: int) -> np.ndarray:
        return np.random.default_rng([1, example, role, kind]).uniform(0.1, 2.0, count)

    places = [(int(e), r) for e in row.examples for r in range(len(chosen.trained))]
    if chosen.head == "score":
        scores = [draw(0, *place, 1)[0] for place in places]
        return Output(scores=torch.tensor(scores, dtype=torch.float32))
    lengths = row.counts().int().tolist()
    tokens = [(*place, n) for place, n in zip(places, lengths, strict=True)]
    logprobs = np.concatenate([-draw(1, *each) for each in tokens])
    return Output(
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        reference=torch.tensor([-draw(2, *each).sum() for each in tokens], dtype=torch.float32),
        baseline=torch.tensor(0.3),
    )


def totals_of(data: Examples, count: int) -> Totals:
    return Totals.of(data.supervised[:count], data.lengths[:count])


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


class Sums(NamedTuple):
    """Values of E examples in float64: sums of sequences and their numbers of tokens, (E, R)."""

    policy: np.ndarray
    reference: np.ndarray
    tokens: np.ndarray
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, row: Row, output: Output) -> Sums:
        logprobs, owner = output.logprobs.double().numpy(), row.owner.numpy()
        sums = np.array([logprobs[owner == s].sum() for s in range(row.sequences)])
        tokens = np.array([(owner == s).sum() for s in range(row.sequences)])
        shape = len(row.examples), -1
        reference = output.reference.double().numpy().reshape(shape)
        values = {name: value.double().numpy() for name, value in row.values.items()}
        return cls(sums.reshape(shape), reference, tokens.reshape(shape), values)

    @property
    def nll(self) -> Any:
        return -self.policy[:, 0].sum() / self.tokens[:, 0].sum()


def sft(s: Sums) -> Any:
    return s.nll


def dpo(s: Sums, *, beta: float = 0.1, smooth: float = 0.0, nll: float = 0.0) -> Any:
    gap = beta * -np.diff(s.policy - s.reference)
    losses = -(1 - smooth) * np.log(sigmoid(gap)) - smooth * np.log(sigmoid(-gap))
    return losses.mean() + nll * s.nll


def ipo(s: Sums, *, beta: float) -> Any:
    each = (s.policy - s.reference) / s.tokens
    return ((-np.diff(each) - 1 / (2 * beta)) ** 2).mean()


def simpo(s: Sums, *, beta: float, gamma: float) -> Any:
    return -np.log(sigmoid(beta * -np.diff(s.policy / s.tokens) - gamma)).mean()


def orpo(s: Sums, *, beta: float) -> Any:
    p = np.exp(s.policy / s.tokens)
    odds = np.log(p / (1 - p))
    return s.nll - beta * np.log(sigmoid(-np.diff(odds))).mean()


def kto(s: Sums, *, beta: float, good: float, bad: float) -> Any:
    gain = beta * ((s.policy - s.reference)[:, 0] - 0.3)
    desirable = s.values["desirable"] > 0.5
    return np.where(desirable, good * (1 - sigmoid(gain)), bad * (1 - sigmoid(-gain))).mean()


def reward(row: Row, output: Output, *, margin: float = 0.0, center: float = 0.0) -> Any:
    scores = output.scores.double().numpy().reshape(-1, 2)
    gap = scores[:, 0] - scores[:, 1] - margin - row.values["margin"].double().numpy()
    return (-np.log(sigmoid(gap)) + center * scores.sum(axis=1) ** 2).mean()


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("sft", {}, sft),
    ("reward", {}, reward),
    ("reward", {"margin": 0.4}, lambda *a: reward(*a, margin=0.4)),
    ("reward", {"center": 0.01}, lambda *a: reward(*a, center=0.01)),
    ("dpo", {}, dpo),
    ("dpo", {"label_smoothing": 0.1, "beta": 0.5}, lambda s: dpo(s, beta=0.5, smooth=0.1)),
    ("dpo", {"nll": 0.2}, lambda s: dpo(s, nll=0.2)),
    ("dpo", {"kind": "ipo", "beta": 0.3}, lambda s: ipo(s, beta=0.3)),
    ("kto", {"undesirable_weight": 1.3, "beta": 0.2}, lambda s: kto(s, beta=0.2, good=1, bad=1.3)),
    ("orpo", {"beta": 0.3}, lambda s: orpo(s, beta=0.3)),
    ("simpo", {"gamma": 0.7}, lambda s: simpo(s, beta=2.0, gamma=0.7)),
]


@pytest.mark.parametrize(("name", "options", "formula"), CASES)
def test_loss_is_its_formula_however_examples_are_dealt(
    name: str, options: dict[str, Any], formula: Any
) -> None:
    """Rows add up to the step, and so do their metrics; gradients are finite differences.

    A wrong detach or a missing term would show in the gradient.
    """
    made = objective(name, options)
    data = examples(made.roles)
    totals = totals_of(data, len(data))
    whole = pack(data, range(len(data)), roles=made.trained)
    output = output_of(whole, made)
    wanted = formula(whole, output) if name == "reward" else formula(Sums.of(whole, output))
    together = made.loss(output, whole, totals)
    assert float(together.value) == pytest.approx(wanted, rel=2e-6)
    parts = []
    for dealt in ([3], [0, 5, 1], [4, 2]):
        row = pack(data, dealt, roles=made.trained)
        parts.append(made.loss(output_of(row, made), row, totals))
    assert sum(float(p.value) for p in parts) == pytest.approx(wanted, rel=2e-6)
    for metric, value in together.measures.items():
        summed = sum(float(p.measures[metric]) for p in parts)
        assert summed == pytest.approx(float(value), rel=1e-5, abs=1e-6), metric
    exact = dataclasses.replace(whole, values={k: v.double() for k, v in whole.values.items()})
    doubled = Output(*(x if x is None else x.double() for x in output))
    field = "scores" if made.head == "score" else "logprobs"

    def value_of(x: torch.Tensor) -> torch.Tensor:
        return made.loss(doubled._replace(**{field: x}), exact, totals).value

    assert torch.autograd.gradcheck(
        value_of, (getattr(doubled, field).requires_grad_(),), atol=1e-5
    )


def test_losses_of_extreme_outputs_are_finite() -> None:
    """exp() of large differences must not overflow in either direction."""
    made = objective("reward", {})
    data = examples(made.roles)
    row, totals = pack(data, [0, 1]), totals_of(data, 2)
    far = torch.tensor([300.0, -300.0, -300.0, 300.0], requires_grad=True)
    loss = made.loss(Output(scores=far), row, totals).value
    loss.backward()
    assert torch.isfinite(far.grad).all()
    assert loss.item() == pytest.approx((600 + float(data.values["margin"][1])) / 2, rel=1e-3)
    sure = torch.zeros(len(row.owner), requires_grad=True)  # a certain answer
    loss = objective("orpo", {}).loss(Output(logprobs=sure), row, totals).value
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(sure.grad).all()


@pytest.mark.parametrize("good", [[0, 3], []])
def test_rewards_of_kto_are_means_over_their_kind(good: list[int]) -> None:
    """Two of five examples are desirable: not two fifths of their mean reward."""
    made = objective("kto", {"beta": 0.2})
    data = examples(made.roles)
    row = pack(data, range(5), roles=made.trained)
    row.values["desirable"][:] = torch.tensor([float(n in good) for n in range(5)])
    output = output_of(row, made)
    loss, sums = made.loss(output, row, totals_of(data, 5)), Sums.of(row, output)
    rewards = 0.2 * (sums.policy - sums.reference)[:, 0]
    kinds = {"reward_desirable": good, "reward_undesirable": sorted({*range(5)} - {*good})}
    means = made.means({name: float(value) for name, value in loss.measures.items()})
    for name, members in kinds.items():
        wanted = float(rewards[members].mean()) if members else math.nan
        assert means[name] == pytest.approx(wanted, rel=1e-5, nan_ok=True)
