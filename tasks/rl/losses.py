"""Losses of online RL: the clipped policy loss with its importance weights, and the critic's.

Shape suffixes: n tokens and s responses of one packed row. Log-probabilities are natural, in nats,
at the sampling temperature. Losses are parts of the minibatch's: those of its rows add up.

The rollout engine computes the policy with other kernels than the trainer. Responses are sampled
from the engine's distribution and trained on as if from the trainer's. Importance weights
r = exp(trainer's - engine's log-probability) correct the expectation. The kinds differ in how they
treat a large or small r:

    none            1 for every r
    tis             min(r, high): Yao et al. 2025, "Your efficient RL framework secretly brings you
                    off-policy RL training"
    icepop          r within [low, high], else 0: drops the token. Ling team 2025, "Small leak can
                    sink a great ship: boost RL training on MoE with IcePop"
    sequence_mask   r of the whole response (the product over its tokens) within [low, high], on
                    all of its tokens, else 0: drops the response. Liu, Li et al. 2025, "When speed
                    kills stability" (Seq-MIS)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tasks.rl.advantages import estimate_kl, spread, sums
from tasks.rl.algorithms import Algorithm
from tasks.rl.experience import Experience
from tasks.rl.settings import Loop
from tasks.training.losses import Loss


class Totals(NamedTuple):
    """Counts over all rows and ranks of a minibatch: the denominators of means."""

    tokens: int
    sequences: int
    max_new_tokens: int


def policy_loss(
    logprobs_n: torch.Tensor,
    row: Experience,
    totals: Totals,
    algorithm: Algorithm,
    loop: Loop,
    entropy_n: torch.Tensor | None = None,
) -> Loss:
    """Return this row's part of -mean(min(ratio A, clipped ratio A)) + KL - entropy, weighted.

    PPO arXiv:1707.06347, eq. 7; different clips on the two sides: DAPO arXiv:2503.14476, eq. 10; a
    bound for negative advantages: dual clip arXiv:1912.09729, eq. 5; one ratio per response: GSPO
    arXiv:2507.18071, eq. 7. `entropy_n` in nats and with gradient, if the loss needs it: its mean
    is over tokens, whatever the algorithm's.

    Metrics, whose sums over rows and ranks are means over the minibatch: `policy_loss` (without KL
    and entropy); per token `approx_kl` (to the old policy, k3), `ratio`, `clip_low_frac` and
    `clip_high_frac` (share of tokens clipped on that side, which have no gradient); and if given
    `kl` (to the reference, k3, nats) and `entropy` (nats).
    """
    assert row.old is not None
    assert row.advantages is not None
    advantages_n, low, high = row.advantages, 1 - loop.clip_low, 1 + loop.clip_high
    kept_n: torch.Tensor | float = 1.0
    if loop.mask_truncated:
        kept_n = spread((~row.truncated).to(advantages_n.dtype), row.lengths)
    share_n = _shares(row, totals, algorithm.aggregate) * kept_n
    ratio_n = (logprobs_n - row.old).exp()
    if algorithm.ratio == "sequence":
        mean_s = sums(logprobs_n - row.old, row.lengths) / row.lengths
        ratio_n = spread(mean_s.exp(), row.lengths)
    objective_n = torch.minimum(ratio_n * advantages_n, ratio_n.clamp(low, high) * advantages_n)
    if loop.dual_clip is not None:
        bound_n = torch.maximum(objective_n, loop.dual_clip * advantages_n)
        objective_n = torch.where(advantages_n < 0, bound_n, objective_n)
    weights_n = correction_weights(row.old, row.sampled, row.lengths, loop)
    policy = -(share_n * (weights_n * objective_n)).sum()
    value = policy
    if row.kl_coef and loop.kl_in == "loss":
        assert row.reference is not None
        kl_n = estimate_kl(logprobs_n, row.reference, loop.kl_estimator)
        value = value + row.kl_coef * (share_n * kl_n).sum()
    if loop.entropy_coef:
        assert entropy_n is not None
        value = value - loop.entropy_coef * ((entropy_n * kept_n).sum() / totals.tokens)
    logprobs_n, ratio_n = logprobs_n.detach(), ratio_n.detach()
    measures = {
        "approx_kl": estimate_kl(row.old, logprobs_n, "k3"),
        "ratio": ratio_n,
        "clip_low_frac": ((ratio_n < low) & (advantages_n < 0)).to(ratio_n.dtype),
        "clip_high_frac": ((ratio_n > high) & (advantages_n > 0)).to(ratio_n.dtype),
    }
    if row.reference is not None:
        measures["kl"] = estimate_kl(logprobs_n, row.reference, "k3")
    if entropy_n is not None:
        measures["entropy"] = entropy_n.detach()
    means = {name: (each_n * kept_n).sum() / totals.tokens for name, each_n in measures.items()}
    return Loss(value, {"policy_loss": policy.detach(), **means})


def _shares(row: Experience, totals: Totals, aggregate: str) -> torch.Tensor:
    """Return the weight of each token in the minibatch's mean: (n,), or () if all are equal.

    `tokens`: the mean over all tokens (DAPO eq. 12); `sequences`: over the responses' means (GRPO,
    arXiv:2402.03300, eq. 3: a token of a long response counts less); `constant`: the sum over
    responses x max_new_tokens (Dr. GRPO, arXiv:2503.20783: a response's length does not matter).
    """
    assert row.advantages is not None
    if aggregate == "tokens":
        return row.advantages.new_tensor(1 / totals.tokens)
    if aggregate == "constant":
        return row.advantages.new_tensor(1 / (totals.sequences * totals.max_new_tokens))
    return spread(1 / (row.lengths.to(row.advantages.dtype) * totals.sequences), row.lengths)


def value_loss(values_n: torch.Tensor, row: Experience, totals: Totals, clip: float | None) -> Loss:
    """Return this row's part of half the mean squared error, with clipped values.

    max((V - R)^2, (V_clipped - R)^2) / 2, where V_clipped is at most `clip` from the value before
    the update: used with PPO (arXiv:1707.06347) since its first implementation. None: no clip. The
    metric `value_clip_frac` is the share of tokens whose loss is the clipped one: no gradient.
    """
    assert row.values is not None
    assert row.returns is not None
    squares_n = clipped_n = (values_n - row.returns).square()
    if clip is not None:
        moved_n = row.values + (values_n - row.values).clamp(-clip, clip)
        clipped_n = (moved_n - row.returns).square()
    value = torch.maximum(squares_n, clipped_n).sum() / 2 / totals.tokens
    decided = (clipped_n > squares_n).to(values_n.dtype).sum() / totals.tokens
    return Loss(value, {"value_loss": value.detach(), "value_clip_frac": decided})


def correction_weights(
    old_n: torch.Tensor, sampled_n: torch.Tensor, lengths_s: torch.Tensor, loop: Loop
) -> torch.Tensor:
    """Return the importance weight of each token by `rl.correction`, (n,), without gradient."""
    kind, high, low = loop.correction, loop.correction_high, loop.correction_low
    log_ratio_n = (old_n - sampled_n).detach()
    if kind == "none":
        return torch.ones_like(log_ratio_n)
    if kind == "tis":
        return log_ratio_n.exp().clamp(max=high)
    if kind == "icepop":
        return _within(log_ratio_n.exp(), low, high)
    assert kind == "sequence_mask", kind
    return spread(_within(sums(log_ratio_n, lengths_s).exp(), low, high), lengths_s)


def _within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
