"""Estimators of advantages (GAE, GRPO, RLOO, REINFORCE++) and of the KL: functions of tensors.

`estimate` returns advantages (N,) and the critic's targets (N,), None without a critic. The score
of a response is the reward of its last token. With an environment, its reward of a turn is that of
the turn's last token, and the rest of the score that of the episode's last one; observations
between sampled tokens take no time. Estimators by groups use the sum over the episode. With
`rl.kl_in=reward` the KL to the reference is subtracted from the reward of every token.

Shape suffixes: N response tokens, S responses, end to end. `lengths_S` (int64) are the tokens of
each response, `groups_S` (int64) are equal for responses to one prompt. Half-precision input is
computed in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from tasks.rl.experience import Experience
    from tasks.rl.settings import Loop

Estimated = tuple[torch.Tensor, torch.Tensor | None]


def estimate(name: str, x: Experience, loop: Loop) -> Estimated:
    """Return advantages and returns by the estimator of that name, see `algorithms.py`.

    PPO has GAE over the tokens' rewards (arXiv:1707.06347, 1506.02438); REINFORCE++ returns that
    are normalised over the whole iteration (arXiv:2501.03262, sec. 3), with a baseline those of
    scores minus their group's mean; the others the response's score within its group.
    """
    if name == "gae":
        assert x.values is not None
        rewards_N = _token_rewards(x, loop, x.rewards)
        advantages_N, returns_N = gae(
            rewards_N, x.values, x.lengths, gamma=loop.gamma, lam=loop.gae_lambda
        )
        return whiten(advantages_N) if loop.whiten else advantages_N, returns_N
    if name in ("returns", "centered_returns"):
        scores_S = x.rewards if name == "returns" else group_centered(x.rewards, x.groups)
        rewards_N = _token_rewards(x, loop, scores_S)
        return whiten(discounted(rewards_N, x.lengths, loop.gamma)), None
    in_group = {
        "group_normalized": group_normalized,
        "group_centered": group_centered,
        "leave_one_out": leave_one_out,
    }[name]
    kl_N, scores_S = _kl(x, loop), x.rewards
    if kl_N is not None:
        scores_S = scores_S - x.kl_coef * sums(kl_N, x.lengths)
    advantages_N = spread(in_group(scores_S, x.groups), x.lengths)
    return whiten(advantages_N) if loop.whiten and name == "leave_one_out" else advantages_N, None


def _token_rewards(x: Experience, loop: Loop, scores_S: torch.Tensor) -> torch.Tensor:
    """Return the reward of every token: (N,)."""
    if x.turn_rewards is None:
        rewards_N = on_last_token(scores_S, x.lengths)
    else:
        rest_S = scores_S - sums(x.turn_rewards, x.lengths)
        rewards_N = x.turn_rewards + on_last_token(rest_S, x.lengths)
    kl_N = _kl(x, loop)
    return rewards_N if kl_N is None else rewards_N - x.kl_coef * kl_N


def _kl(x: Experience, loop: Loop) -> torch.Tensor | None:
    """Return the estimated KL to the reference, (N,); None if it is not part of the reward."""
    if loop.kl_in != "reward" or x.kl_coef == 0:
        return None
    assert x.reference is not None
    assert x.old is not None, "with a reference the update does not measure it"
    return estimate_kl(x.old, x.reference, loop.kl_estimator)


def estimate_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) of each token, in nats, from tokens that the policy sampled.

    J. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With policy p,
    reference q and d = log p - log q:

        k1 = d                  unbiased for KL(p || q), of either sign
        k2 = d^2 / 2            biased, positive, of low variance
        k3 = exp(-d) - 1 + d    unbiased, positive, of low variance; at most 10 nats here

    In a loss the derivative counts, not the value. The derivative of k1 is zero on average, so k1
    gets the derivative d * grad log p instead. Its average is the gradient of KL(p || q); k2 has it
    by itself. k3 keeps its own derivative, as in GRPO (arXiv:2402.03300, eq. 4): its average is the
    gradient of KL(q || p), which has the same minimum.
    """
    log_ratio = logprobs - reference
    if estimator == "k3":
        # Clamps as in verl's core_algos.py: without them one token of 34 nats outweighs a batch.
        log_ratio = log_ratio.clamp(-20, 20)
        return (torch.expm1(-log_ratio) + log_ratio).clamp(max=10)
    half_square = log_ratio.square() / 2
    if estimator == "k2":
        return half_square
    assert estimator == "k1", estimator
    return log_ratio.detach() + half_square - half_square.detach()


def gae(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    lengths_S: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, arXiv:1506.02438, eq. 11 and 16.

    A_t = sum over k of (gamma lam)^k d_{t+k}, with d_t = r_t + gamma V_{t+1} - V_t. Every response
    ends an episode: the value after its last token is 0, even if it was cut off. In an episode of
    several turns t counts sampled tokens: V_{t+1} after a turn's last token is the value before the
    next turn's first one, which has read the observation. `values_N` are those before each token;
    lam=0 uses the critic's value after each token, lam=1 only the rewards that follow.

    Returns advantages (N,), and returns (N,) = advantages + values, the critic's targets.
    """
    rewards_N, values_N = _at_least_float32(rewards_N), _at_least_float32(values_N)
    after_N = torch.zeros_like(values_N)
    after_N[:-1] = values_N[1:]
    after_N[_last(lengths_S)] = 0.0
    surprises_N = rewards_N + gamma * after_N - values_N
    advantages_N = discounted(surprises_N, lengths_S, gamma * lam)
    return advantages_N, advantages_N + values_N


def on_last_token(scores_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Return rewards (N,): each response's score at its last token, zero elsewhere."""
    rewards_N = scores_S.new_zeros(int(lengths_S.sum()))
    rewards_N[_last(lengths_S)] = scores_S
    return rewards_N


def spread(per_response_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Repeat each response's number for all of its tokens: (N,)."""
    return per_response_S.repeat_interleave(lengths_S)


def sums(per_token_N: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Return the sum over each response's tokens: (S,)."""
    owner_N = torch.arange(len(lengths_S), device=lengths_S.device).repeat_interleave(lengths_S)
    zeros_S = per_token_N.new_zeros(len(lengths_S))
    return zeros_S.index_add(0, owner_N, per_token_N)


def group_centered(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return scores minus the mean of their group, (S,): Dr. GRPO, arXiv:2503.20783, sec. 3.2.

    A group of equal scores gives exactly zero, and so does a group of one: scores are taken
    relative to the smallest one of their group, as the mean of three times 0.1 is not 0.1.
    """
    scores_S = _at_least_float32(scores_S)
    above_S = scores_S - _of_group(scores_S, groups_S, "amin")
    return above_S - _of_group(above_S, groups_S, "mean")


def group_normalized(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return scores minus their group's mean, over its deviation, (S,): GRPO, arXiv:2402.03300.

    The standard deviation is that of a sample (n - 1). There is no epsilon in the denominator, so
    the scale of rewards does not matter. A group whose deviation is only rounding gives exactly
    zero.
    """
    return group_centered(scores_S, groups_S) * _inverse_deviation(scores_S, groups_S)


def without_signal(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return True for responses whose group's scores are equal within rounding, (S,) bool."""
    return _inverse_deviation(scores_S, groups_S) == 0


def leave_one_out(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return scores minus the mean of their group's others, (S,): RLOO, arXiv:2402.14740, eq. 8.

    Equal to n / (n - 1) times the centred scores. A group of one has no others and gives zero.
    """
    centered_S = group_centered(scores_S, groups_S)
    count_S = _of_group(torch.ones_like(centered_S), groups_S, "sum")
    return centered_S * count_S / (count_S - 1).clamp(min=1)


def whiten(values_N: torch.Tensor) -> torch.Tensor:
    """Normalise to mean 0 and deviation 1 (sample, n - 1); equal values give exactly zero."""
    values_N = _at_least_float32(values_N)
    return group_normalized(values_N, torch.zeros_like(values_N, dtype=torch.int64))


def _of_group(values_S: torch.Tensor, groups_S: torch.Tensor, reduce: str) -> torch.Tensor:
    """Return sum, mean or extreme of each group, repeated for its members: (S,)."""
    names_G, group_S = groups_S.unique(return_inverse=True)
    zeros_G = values_S.new_zeros(len(names_G))
    return zeros_G.scatter_reduce(0, group_S, values_S, reduce, include_self=False)[group_S]


def _inverse_deviation(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return 1 / deviation of each group, or 0 where it is no more than rounding of the scores."""
    centered_S = group_centered(scores_S, groups_S)
    count_S = _of_group(torch.ones_like(centered_S), groups_S, "sum")
    variance_S = _of_group(centered_S.square(), groups_S, "sum") / (count_S - 1).clamp(min=1)
    deviation_S = variance_S.sqrt()
    largest_S = _of_group(_at_least_float32(scores_S).abs(), groups_S, "amax")
    signal_S = deviation_S > 4 * torch.finfo(deviation_S.dtype).eps * largest_S
    return torch.where(signal_S, 1 / deviation_S.where(signal_S, 1.0), 0.0)


def discounted(values_N: torch.Tensor, lengths_S: torch.Tensor, decay: float) -> torch.Tensor:
    """Return x_t + decay x_{t+1} + decay^2 x_{t+2} + ... within each response.

    All responses at once, from the last token of the longest one backwards; the padding is zero and
    adds nothing.
    """
    values_N = _at_least_float32(values_N)
    padded_SL = pad_sequence(values_N.split(lengths_S.tolist()), batch_first=True)
    for t in range(padded_SL.shape[1] - 2, -1, -1):
        padded_SL[:, t] += decay * padded_SL[:, t + 1]
    token_L = torch.arange(padded_SL.shape[1], device=lengths_S.device)
    return padded_SL[token_L < lengths_S[:, None]]


def _last(lengths_S: torch.Tensor) -> torch.Tensor:
    """Return the index of each response's last token: (S,)."""
    return lengths_S.cumsum(0) - 1


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
