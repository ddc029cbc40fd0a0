"""Every loss against its formula in float64, and rows against the whole step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tasks.core.errors import ConfigError
from tasks.training.losses import ModelOutput, Objective, objective
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import Row, pack

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


def trained_roles(chosen: Objective) -> list[int]:
    return [i for i, name in enumerate(chosen.roles) if name != chosen.baseline_role]


def output_of(row: Row, chosen: Objective, seed: int = 1) -> ModelOutput:
    """Return random model output that depends on the example, but not on its row."""
    each = len(trained_roles(chosen))

    def draw(example: int, role: int, count: int, kind: int) -> np.ndarray:
        return np.random.default_rng([seed, example, role, kind]).uniform(0.1, 2.0, count)

    sequences = [(int(e), r) for e in row.examples for r in range(each)]
    counts = row.counts().int().tolist()
    if chosen.head == "score":
        scores = [draw(e, r, 1, 0)[0] for e, r in sequences]
        return ModelOutput(scores=torch.tensor(scores, dtype=torch.float32))
    logprobs = np.concatenate(
        [-draw(e, r, n, 1) for (e, r), n in zip(sequences, counts, strict=True)]
    )
    reference = [-draw(e, r, n, 2).sum() for (e, r), n in zip(sequences, counts, strict=True)]
    return ModelOutput(
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        reference=torch.tensor(reference, dtype=torch.float32),
        baseline=torch.tensor(0.3),
    )


def step_counts(data: Examples, chosen: Sequence[int]) -> Counts:
    supervised = data.supervised[list(chosen)].sum(axis=0)
    return Counts(len(chosen), tuple(int(n) for n in supervised), 0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def by_sequence(row: Row, output: ModelOutput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (E, 2) sums of log-probs, those of the reference, and token counts; float64."""
    assert output.logprobs is not None
    assert output.reference is not None
    logprobs, owner = output.logprobs.double().numpy(), row.owner.numpy()
    sums = np.array([logprobs[owner == s].sum() for s in range(row.sequences)])
    tokens = np.array([(owner == s).sum() for s in range(row.sequences)])
    reference = output.reference.double().numpy()
    each = row.sequences // len(row.examples)
    return sums.reshape(-1, each), reference.reshape(-1, each), tokens.reshape(-1, each)


def dpo(
    row: Row, output: ModelOutput, *, beta: float, smooth: float = 0.0, nll: float = 0.0
) -> float:
    sums, reference, tokens = by_sequence(row, output)
    gap = beta * ((sums - reference)[:, 0] - (sums - reference)[:, 1])
    losses = -(1 - smooth) * np.log(sigmoid(gap)) - smooth * np.log(sigmoid(-gap))
    return float(losses.mean() - nll * sums[:, 0].sum() / tokens[:, 0].sum())


def ipo(row: Row, output: ModelOutput, *, beta: float) -> float:
    sums, reference, tokens = by_sequence(row, output)
    each = (sums - reference) / tokens
    return float(((each[:, 0] - each[:, 1] - 1 / (2 * beta)) ** 2).mean())


def simpo(row: Row, output: ModelOutput, *, beta: float, gamma: float) -> float:
    sums, _, tokens = by_sequence(row, output)
    means = sums / tokens
    return float(-np.log(sigmoid(beta * (means[:, 0] - means[:, 1]) - gamma)).mean())


def orpo(row: Row, output: ModelOutput, *, beta: float) -> float:
    sums, _, tokens = by_sequence(row, output)
    p = np.exp(sums / tokens)
    odds = p / (1 - p)
    nll = -sums[:, 0].sum() / tokens[:, 0].sum()
    return float(nll - beta * np.log(sigmoid(np.log(odds[:, 0] / odds[:, 1]))).mean())


def kto(row: Row, output: ModelOutput, *, beta: float, good: float, bad: float) -> float:
    sums, reference, _ = by_sequence(row, output)
    ratio, z0 = (sums - reference)[:, 0], 0.3
    desirable = row.values["desirable"].numpy() > 0.5
    value = np.where(
        desirable, good * sigmoid(beta * (ratio - z0)), bad * sigmoid(beta * (z0 - ratio))
    )
    return float((np.where(desirable, good, bad) - value).mean())


def reward(row: Row, output: ModelOutput, *, margin: float = 0.0, center: float = 0.0) -> float:
    assert output.scores is not None
    scores = output.scores.double().numpy().reshape(-1, 2)
    gap = scores[:, 0] - scores[:, 1] - margin - row.values["margin"].double().numpy()
    return float((-np.log(sigmoid(gap)) + center * scores.sum(axis=1) ** 2).mean())


def sft(row: Row, output: ModelOutput) -> float:
    assert output.logprobs is not None
    return float(-output.logprobs.double().mean())


CASES = {
    "sft": ("sft", {}, sft),
    "reward": ("reward", {}, reward),
    "reward-margin": ("reward", {"margin": 0.4}, lambda r, s: reward(r, s, margin=0.4)),
    "reward-centred": ("reward", {"center": 0.01}, lambda r, s: reward(r, s, center=0.01)),
    "dpo": ("dpo", {}, lambda r, s: dpo(r, s, beta=0.1)),
    "dpo-conservative": (
        "dpo",
        {"label_smoothing": 0.1, "beta": 0.5},
        lambda r, s: dpo(r, s, beta=0.5, smooth=0.1),
    ),
    "dpo-nll": ("dpo", {"nll": 0.2}, lambda r, s: dpo(r, s, beta=0.1, nll=0.2)),
    "ipo": ("dpo", {"kind": "ipo", "beta": 0.3}, lambda r, s: ipo(r, s, beta=0.3)),
    "kto": (
        "kto",
        {"desirable_weight": 1.0, "undesirable_weight": 1.3, "beta": 0.2},
        lambda r, s: kto(r, s, beta=0.2, good=1.0, bad=1.3),
    ),
    "orpo": ("orpo", {"beta": 0.3}, lambda r, s: orpo(r, s, beta=0.3)),
    "simpo": ("simpo", {"gamma": 0.7}, lambda r, s: simpo(r, s, beta=2.0, gamma=0.7)),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_is_its_formula_however_examples_are_dealt(case: str) -> None:
    """Rows add up to the step, and so do their measures; gradients are finite differences.

    A wrong detach or a missing term would show in the gradient.
    """
    name, knobs, formula = CASES[case]
    made = objective(name, knobs)
    data = examples(made.roles)
    counts = step_counts(data, range(len(data)))
    whole = pack(data, range(len(data)), roles=trained_roles(made))
    output = output_of(whole, made)
    wanted, together = formula(whole, output), made.loss(output, whole, counts)
    assert float(together.value) == pytest.approx(wanted, rel=2e-6)
    parts = []
    for dealt in ([3], [0, 5, 1], [4, 2]):
        row = pack(data, dealt, roles=trained_roles(made))
        parts.append(made.loss(output_of(row, made), row, counts))
    assert sum(float(p.value) for p in parts) == pytest.approx(wanted, rel=2e-6)
    for measure, value in together.measures.items():
        summed = sum(float(p.measures[measure]) for p in parts)
        assert summed == pytest.approx(float(value), rel=1e-5, abs=1e-6), measure
    exact = dataclasses.replace(whole, values={k: v.double() for k, v in whole.values.items()})
    doubled = {k: v.double() for k, v in vars(output).items() if v is not None}
    field = "scores" if made.head == "score" else "logprobs"

    def value_of(x: torch.Tensor) -> torch.Tensor:
        return made.loss(ModelOutput(**{**doubled, field: x}), exact, counts).value

    assert torch.autograd.gradcheck(value_of, (doubled[field].requires_grad_(),), atol=1e-5)


def test_losses_of_extreme_outputs_are_finite() -> None:
    """exp() of large differences must not overflow in either direction."""
    made = objective("reward", {})
    data = examples(made.roles)
    row, counts = pack(data, [0, 1]), step_counts(data, [0, 1])
    far = torch.tensor([300.0, -300.0, -300.0, 300.0], requires_grad=True)
    loss = made.loss(ModelOutput(scores=far), row, counts).value
    loss.backward()
    assert torch.isfinite(far.grad).all()
    wanted = (600 + float(data.values["margin"][1])) / 2
    assert float(loss) == pytest.approx(wanted, rel=1e-3)
    sure = torch.zeros(len(row.owner), requires_grad=True)  # a certain answer
    loss = objective("orpo", {}).loss(ModelOutput(logprobs=sure), row, counts).value
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(sure.grad).all()


@pytest.mark.parametrize(
    ("name", "knobs", "named"),
    [
        ("sfd", {}, "train.objective=sfd"),
        ("sft", {"beta": 0.1}, "train.loss.beta"),
        ("dpo", {"gamma": 1.0, "center": 2.0}, "train.loss.center"),
        ("dpo", {"kind": "hinge"}, "train.loss.kind=hinge"),
        ("dpo", {"label_smoothing": 0.5}, "train.loss.label_smoothing=0.5"),
        ("reward", {"kind": "ipo"}, "train.loss.kind"),
    ],
)
def test_invalid_options_are_refused(name: str, knobs: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        objective(name, knobs)


@pytest.mark.parametrize("good", [[0, 3], []])
def test_rewards_of_kto_are_means_over_their_kind(good: Sequence[int]) -> None:
    """Two of five examples are desirable: not two fifths of their mean reward."""
    made = objective("kto", {"beta": 0.2})
    data = examples(made.roles)
    row = pack(data, range(5), roles=trained_roles(made))
    row.values["desirable"][:] = torch.tensor([float(n in good) for n in range(5)])
    output = output_of(row, made)
    loss = made.loss(output, row, step_counts(data, range(5)))
    sums, reference, _ = by_sequence(row, output)
    rewards = 0.2 * (sums - reference)[:, 0]
    kinds = {"reward_desirable": list(good), "reward_undesirable": sorted({*range(5)} - {*good})}
    means = made.means({name: float(value) for name, value in loss.measures.items()})
    for name, members in kinds.items():
        wanted = float(rewards[members].mean()) if members else math.nan
        assert means[name] == pytest.approx(wanted, rel=1e-5, nan_ok=True)
