"""Losses, KL and corrections; `test_trl_parity.py` compares the policy loss with TRL's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tasks.core.errors import TrainingError
from tasks.rl.advantages import estimate_kl
from tasks.rl.algorithms import Algorithm
from tasks.rl.experience import Experience, has_grown, mismatch
from tasks.rl.loop import adapted
from tasks.rl.losses import Totals, policy_loss, value_loss
from tasks.training.losses import Loss
from tests.rl.making import KL, drawn
from tests.settings import Loop

LENGTHS = [5, 1, 8, 3, 6]
MOST = 9
TOTALS = Totals(tokens=sum(LENGTHS), sequences=len(LENGTHS), max_new_tokens=MOST)


@dataclass(frozen=True)
class Case:
    """Ratio and mean of an algorithm, and options of section `rl`."""

    ratio: str = "token"
    aggregate: str = "tokens"
    kl_coef: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def loss(
        self,
        logprobs: torch.Tensor,
        experience: Experience,
        entropy: torch.Tensor,
        totals: Totals = TOTALS,
        **more: Any,
    ) -> Loss:
        row = replace(experience, kl_coef=self.kl_coef)
        algorithm = Algorithm("", "", self.aggregate, self.ratio)
        loop = replace(Loop(), **{"correction": "none", **self.options, **more})
        return policy_loss(logprobs, row, totals, algorithm, loop, entropy)


CASES = {
    "asymmetric": Case(options={"clip_low": 0.1, "clip_high": 0.4, "correction": "icepop"}),
    "dr_grpo": Case("token", "constant", 0.3, {"kl_estimator": "k2", "correction": "tis"}),
    "gspo": Case("sequence", "sequences", 0.0, {"clip_low": 0.05, "clip_high": 0.08}),
    "everything": Case(
        "sequence",
        "constant",
        0.2,
        {"dual_clip": 1.5, "kl_estimator": "k1", "entropy_coef": 0.1},
    ),
}


def data(lengths: Sequence[int] = LENGTHS) -> tuple[torch.Tensor, Experience, torch.Tensor]:
    """Log-probabilities, the row, entropies; the tokens of a response have equal advantages."""
    count, sizes = sum(lengths), torch.tensor(lengths)
    old = -drawn(count, 3).abs()
    experience = Experience(
        lengths=sizes,
        groups=torch.zeros_like(sizes),
        rewards=torch.zeros(len(sizes)),
        truncated=torch.zeros(len(sizes), dtype=torch.bool),
        sampled=old + 0.2 * drawn(count, 5),
        old=old,
        reference=old + 0.4 * drawn(count, 6),
        advantages=drawn(len(sizes), 4).repeat_interleave(sizes),
    )
    return old + 0.5 * drawn(count, 2), experience, drawn(count, 7).abs()


def numbers(loss: Loss) -> dict[str, float]:
    """Return value and metrics of a loss."""
    measures = {name: float(value) for name, value in loss.measures.items()}
    return {"value": float(loss.value), **measures}


@pytest.mark.parametrize("case", CASES)
def test_rows_add_up_and_masked_responses_count_in_no_mean(case: str) -> None:
    logprobs, whole, entropy = data()
    loss = CASES[case].loss

    def part(chosen: list[int], totals: Totals = TOTALS) -> dict[str, float]:
        at = whole.places(chosen)
        return numbers(loss(logprobs[at], whole.part(chosen), entropy[at], totals))

    first, second = part([3, 0]), part([4, 1, 2])
    summed = {name: first[name] + second[name] for name in first}
    assert summed == pytest.approx(numbers(loss(logprobs, whole, entropy)), rel=1e-9, abs=1e-12)
    totals = Totals(sum(LENGTHS[n] for n in (0, 2, 3)), 3, MOST)
    cut = replace(whole, truncated=torch.tensor([False, True, False, False, True]))
    masked = numbers(loss(logprobs, cut, entropy, totals, mask_truncated=True))
    assert masked == pytest.approx(part([0, 2, 3], totals), rel=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_equals_its_formula(clip: float | None) -> None:
    values, old, returns = (drawn(7, seed) for seed in (0, 1, 2))
    total, decided = 0.0, 0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        plain = (v - r) ** 2
        clipped = plain if clip is None else (o + max(-clip, min(clip, v - o)) - r) ** 2
        total += max(plain, clipped) / 2 / 12
        decided += clipped > plain
    _, experience, _ = data([7])
    responses = replace(experience, values=old, returns=returns)
    actual = value_loss(values, responses, Totals(12, 3, 8), clip)
    assert float(actual.value) == pytest.approx(total, rel=1e-12)
    assert float(actual.measures["value_loss"]) == pytest.approx(total, rel=1e-12)
    assert float(actual.measures["value_clip_frac"]) == pytest.approx(decided / 12, rel=1e-12)
    assert (decided > 0) == (clip is not None)


POLICY = torch.tensor([0.3, -0.8, 1.1, 0.0, -1.5], dtype=torch.float64)
OTHER = torch.tensor([-0.2, 0.5, 0.9, -1.0, 0.4], dtype=torch.float64)
"""Logits of two distributions over five tokens."""


def divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q), summed over all tokens."""
    p, q = p_logits.log_softmax(0), q_logits.log_softmax(0)
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("estimator", KL)
def test_kl_estimates_have_the_mean_and_gradient_that_theory_says(estimator: str) -> None:
    """The naive derivative of k1 averages to zero and would have no effect in a loss."""
    logits, probability = POLICY.clone().requires_grad_(), POLICY.softmax(0)
    logprobs, reference = logits.log_softmax(0), OTHER.log_softmax(0)
    estimates = estimate_kl(logprobs, reference, estimator)
    wanted = [KL[estimator](float(d)) for d in (logprobs - reference).detach()]
    assert estimates.tolist() == pytest.approx(wanted, rel=1e-12)
    mean = (probability * estimates).sum()  # over the policy's distribution: exact, not sampled
    if estimator != "k2":  # k2 is biased
        assert float(mean.detach()) == pytest.approx(float(divergence(POLICY, OTHER)), rel=1e-12)
    both = (OTHER, logits) if estimator == "k3" else (logits, OTHER)
    (moves,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (right,) = torch.autograd.grad(divergence(*both), logits)
    torch.testing.assert_close(moves, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nats", [14.0, 34.5])
def test_one_extreme_token_does_not_decide(nats: float) -> None:
    """Without the clamps 14 nats are 294 nats per token over 4,096, and 34.5 a gradient of 1e15."""
    reference = torch.zeros(4096, dtype=torch.float64)
    policy = reference.clone()
    policy[7] = -nats
    policy.requires_grad_()
    mean = estimate_kl(policy, reference, "k3").mean()
    assert float(mean.detach()) == pytest.approx(10 / 4096)
    mean.backward()
    assert policy.grad is not None
    assert float(policy.grad.abs().max()) == 0.0


@pytest.mark.parametrize(
    ("measured", "responses", "factor"),
    [
        (0.021, 100, 1.05),  # a miss of 5 %, over one horizon
        (0.5, 50, 1.2**0.5),  # cut off
        (0.0, 1000, 0.8**10),  # a whole iteration of ten horizons, and still positive
    ],
)
def test_the_adaptive_coefficient_moves_by_the_relative_error(
    measured: float, responses: int, factor: float
) -> None:
    loop, record = Loop(kl_target=0.02, kl_horizon=100), {"kl": 9.0, "kl_k1": measured}
    assert adapted(0.1, record, responses, loop) == pytest.approx(0.1 * factor, rel=1e-12)
    assert adapted(0.3, record, responses, Loop()) == 0.3
    assert adapted(0.0, {}, responses, loop) == 0.0  # nothing measures the KL


def test_mismatch() -> None:
    """A limit alone would let NaN pass: `nan > limit` is false."""
    sampled = -torch.linspace(0.1, 3.0, 5, dtype=torch.float64)
    gaps = [0.4, -0.1, 0.6, -1.2, 0.0]
    trained = sampled + torch.tensor(gaps, dtype=torch.float64)
    actual = mismatch(trained, sampled)
    assert actual.mean_abs == pytest.approx(sum(map(abs, gaps)) / 5, rel=1e-12)
    assert actual.max_abs == pytest.approx(1.2, rel=1e-12)
    assert actual.kl == pytest.approx(sum(KL["k3"](-d) for d in gaps) / 5, rel=1e-12)
    bad = sampled.clone()
    bad[[2, 4]] = -math.inf
    for both, whose in (((bad, sampled), "trainer"), ((trained, bad), "engine")):
        with pytest.raises(TrainingError, match=f"2 of 5 .*{whose}"):
            mismatch(*both)


def test_a_mismatch_that_grows_below_the_limit_is_warned_of_once() -> None:
    usual: list[float] = []
    healthy = (0.0058, 0.0064, 0.0068, 0.0053, 0.0047)  # GRPO on the toy, seed 0
    for value, grown in ((0.02, False), *((v, False) for v in healthy)):
        assert has_grown(usual, value, 0.1) is grown
    for value, grown in ((0.0231, False), (0.0257, True), (0.0999, False)):
        assert has_grown(usual, value, 0.1) is grown
