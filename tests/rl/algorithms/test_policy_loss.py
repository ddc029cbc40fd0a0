"""The policy loss compared with its formula token by token; rows, gradients, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl.algorithms.batch import Totals
from tasks.rl.algorithms.policy_loss import LossInputs, PolicyLoss

LENGTHS = [5, 1, 8, 3, 6]
MOST = 9
TOTALS = Totals(tokens=sum(LENGTHS), sequences=len(LENGTHS), max_new_tokens=MOST)

CASES = {
    "ppo": PolicyLoss(),
    "asymmetric": PolicyLoss(clip_low=0.1, clip_high=0.4),
    "dual": PolicyLoss(dual_clip=1.3),
    "grpo": PolicyLoss(aggregate="sequences", kl_coef=0.3),
    "dr_grpo": PolicyLoss(aggregate="constant", kl_coef=0.3, kl_estimator="k2"),
    "gspo": PolicyLoss(ratio="sequence", aggregate="sequences", clip_low=0.05, clip_high=0.08),
    "entropy": PolicyLoss(entropy_coef=0.4, aggregate="sequences"),
    "everything": PolicyLoss(
        ratio="sequence",
        aggregate="constant",
        dual_clip=1.5,
        kl_coef=0.2,
        kl_estimator="k1",
        entropy_coef=0.1,
    ),
}


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def data(lengths: Sequence[int] = LENGTHS, seed: int = 2) -> tuple[torch.Tensor, LossInputs]:
    """Log-probabilities and the other inputs; all tokens of a response have the same advantage."""
    count = sum(lengths)
    old = -drawn(count, seed + 1).abs()
    sizes = torch.tensor(lengths)
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    made = LossInputs(
        old_n=old,
        advantages_n=drawn(len(sizes), seed + 2)[owner],
        weights_n=drawn(count, seed + 3).abs(),
        owner_n=owner,
        lengths_s=sizes,
        totals=TOTALS,
        reference_n=old + 0.4 * drawn(count, seed + 4),
        entropy_n=drawn(count, seed + 5).abs(),
    )
    return old + 0.5 * drawn(count, seed), made


def written_out(loss: PolicyLoss, logprobs: torch.Tensor, inputs: LossInputs) -> dict[str, float]:
    """Loss and metrics, computed token by token."""
    expected = dict.fromkeys(
        ("value", "policy_loss", "kl", "approx_kl", "ratio", "clip_low_frac", "clip_high_frac",
         "entropy"), 0.0
    )  # fmt: skip
    assert inputs.reference_n is not None
    assert inputs.entropy_n is not None
    new, old, reference = (t.tolist() for t in (logprobs, inputs.old_n, inputs.reference_n))
    owner = inputs.owner_n.tolist()
    for t in range(len(new)):
        own = [j for j in range(len(new)) if owner[j] == owner[t]]
        ratio = math.exp(new[t] - old[t])
        if loss.ratio == "sequence":
            ratio = math.exp(sum(new[j] - old[j] for j in own) / len(own))
        advantage, weight = float(inputs.advantages_n[t]), float(inputs.weights_n[t])
        kept = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        objective = min(ratio * advantage, kept * advantage)
        if loss.dual_clip is not None and advantage < 0:
            objective = max(objective, loss.dual_clip * advantage)
        share = {
            "tokens": 1 / TOTALS.tokens,
            "sequences": 1 / len(own) / TOTALS.sequences,
            "constant": 1 / TOTALS.sequences / MOST,
        }[loss.aggregate]
        d = new[t] - reference[t]
        k3 = math.exp(-d) - 1 + d
        distance = {"k1": d, "k2": d * d / 2, "k3": k3}[loss.kl_estimator]
        expected["policy_loss"] -= share * weight * objective
        expected["value"] += share * (loss.kl_coef * distance - weight * objective)
        expected["value"] -= loss.entropy_coef * float(inputs.entropy_n[t]) / TOTALS.tokens
        expected["kl"] += k3 / TOTALS.tokens
        expected["approx_kl"] += (math.exp(new[t] - old[t]) - 1 - new[t] + old[t]) / TOTALS.tokens
        expected["ratio"] += ratio / TOTALS.tokens
        expected["clip_low_frac"] += (ratio < 1 - loss.clip_low and advantage < 0) / TOTALS.tokens
        expected["clip_high_frac"] += (ratio > 1 + loss.clip_high and advantage > 0) / TOTALS.tokens
        expected["entropy"] += float(inputs.entropy_n[t]) / TOTALS.tokens
    return expected


@pytest.mark.parametrize("case", CASES)
def test_masked_responses_count_in_no_mean(case: str) -> None:
    """The loss of all responses, two masked, is that of the others alone."""
    logprobs, inputs = data()
    kept_s = torch.tensor([True, False, True, True, False])
    kept_n = kept_s[inputs.owner_n]
    sizes = inputs.lengths_s[kept_s]
    totals = Totals(int(sizes.sum()), len(sizes), MOST)
    per_token = ("old_n", "advantages_n", "weights_n", "reference_n", "entropy_n")
    others = replace(
        inputs, lengths_s=sizes, owner_n=torch.arange(len(sizes)).repeat_interleave(sizes),
        totals=totals, **{name: getattr(inputs, name)[kept_n] for name in per_token},
    )  # fmt: skip
    actual = CASES[case](logprobs, replace(inputs, totals=totals, kept_n=kept_n.double()))
    wanted = CASES[case](logprobs[kept_n], others)
    assert float(actual.value) == pytest.approx(float(wanted.value), rel=1e-12)
    assert _floats(actual.measures) == pytest.approx(_floats(wanted.measures), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_metrics_equal_their_formulas(case: str) -> None:
    logprobs, inputs = data()
    actual = CASES[case](logprobs, inputs)
    wanted = written_out(CASES[case], logprobs, inputs)
    assert {"value": float(actual.value), **_floats(actual.measures)} == pytest.approx(
        wanted, rel=1e-10
    )


def _floats(measures: object) -> dict[str, float]:
    assert isinstance(measures, dict)
    return {name: float(value) for name, value in measures.items()}


def part_of(inputs: LossInputs, chosen: Sequence[int]) -> tuple[torch.Tensor, LossInputs]:
    """Return the tokens of the chosen responses, and the row of these alone."""
    places = torch.cat([(inputs.owner_n == s).nonzero()[:, 0] for s in chosen])
    sizes = inputs.lengths_s[list(chosen)]
    assert inputs.reference_n is not None
    assert inputs.entropy_n is not None
    return places, replace(
        inputs,
        old_n=inputs.old_n[places],
        advantages_n=inputs.advantages_n[places],
        weights_n=inputs.weights_n[places],
        owner_n=torch.arange(len(sizes)).repeat_interleave(sizes),
        lengths_s=sizes,
        reference_n=inputs.reference_n[places],
        entropy_n=inputs.entropy_n[places],
    )


@settings(max_examples=5, deadline=None)
@given(st.permutations(range(len(LENGTHS))), st.integers(1, 3), st.integers(0, 5))
@pytest.mark.parametrize("case", CASES)
def test_losses_of_rows_add_up_for_any_split(
    case: str, order: list[int], cut: int, seed: int
) -> None:
    logprobs, whole = data(seed=seed)
    wanted = CASES[case](logprobs, whole)
    parts = []
    for chosen in (order[:cut], order[cut:]):
        places, row = part_of(whole, chosen)
        parts.append(CASES[case](logprobs[places], row))
    assert sum(float(p.value) for p in parts) == pytest.approx(float(wanted.value), rel=1e-9)
    for name, value in wanted.measures.items():
        summed = sum(float(p.measures[name]) for p in parts)
        assert summed == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("case", [name for name in CASES if name != "everything"])
def test_gradient_equals_finite_differences(case: str) -> None:
    """All but k1, whose gradient is not the derivative of its value: see `test_kl.py`."""
    logprobs, inputs = data()
    logprobs.requires_grad_()
    entropy = inputs.entropy_n
    assert entropy is not None
    entropy.requires_grad_()

    def value(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return CASES[case](x, replace(inputs, entropy_n=h)).value

    assert torch.autograd.gradcheck(value, (logprobs, entropy))


def test_k1_has_the_gradient_of_k2() -> None:
    gradients = []
    for estimator in ("k1", "k2"):
        logprobs, inputs = data()
        logprobs.requires_grad_()
        PolicyLoss(kl_coef=0.5, kl_estimator=estimator)(logprobs, inputs).value.backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients)


def gradient_at(ratio: float, advantage: float, loss: PolicyLoss) -> float:
    """Gradient of the loss with respect to the log-probability of a response of one token."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, dtype=torch.float64)
    inputs = LossInputs(
        old_n=torch.zeros(1, dtype=torch.float64),
        advantages_n=advantage * ones,
        weights_n=ones,
        owner_n=torch.zeros(1, dtype=torch.int64),
        lengths_s=torch.ones(1, dtype=torch.int64),
        totals=Totals(1, 1, 1),
    )
    loss(logprobs, inputs).value.backward()
    assert logprobs.grad is not None
    return float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [
        (1.0, 2.0, -2.0),  # at the old policy: the policy gradient itself
        (1.0, -2.0, 2.0),
        (1.25, 2.0, -2.5),  # better, and within 1.3
        (1.35, 2.0, 0.0),  # better, and moved enough
        (0.75, -2.0, 0.0),  # worse, and moved enough
        (0.75, 2.0, -1.5),  # better, and yet less likely than it was: pulled back
        (1.35, -2.0, 2.7),  # worse, and yet more likely than it was: pulled back
        (3.5, -2.0, 0.0),  # so much worse that it would drown all others: bounded
    ],
)
def test_tokens_with_a_gradient(ratio: float, advantage: float, wanted: float) -> None:
    loss = PolicyLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert gradient_at(ratio, advantage, loss) == pytest.approx(wanted, rel=1e-12)


def test_masked_tokens_have_no_gradient() -> None:
    logprobs, inputs = data()
    logprobs.requires_grad_()
    masked = replace(inputs, weights_n=inputs.weights_n * (inputs.owner_n != 2))
    PolicyLoss()(logprobs, masked).value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[inputs.owner_n == 2].tolist() == [0.0] * LENGTHS[2]
    assert float(logprobs.grad[inputs.owner_n != 2].abs().max()) > 0
