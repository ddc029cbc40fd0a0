"""Advantage estimators (GAE, GRPO, RLOO, REINFORCE++). Pure functions of rewards.

Shape suffixes: N response tokens, S responses, see `batch.py`. All functions take `lengths_S`
(int64, tokens of each response) and `groups_S` (int64, equal for responses to one prompt) in
these shapes. Half-precision input is computed in float32.
"""

from __future__ import annotations

import torch


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
    next turn's first one, which has read the observation.

    Args:
        rewards_N: reward of each token.
        values_N: value by the critic before each token.
        lengths_S: tokens of each response.
        gamma: discount per token.
        lam: 0 uses the critic's value after each token, 1 uses only the rewards that follow.

    Returns:
        Advantages (N,), and returns (N,) = advantages + values, the critic's targets.
    """
    rewards_N, values_N = _at_least_float32(rewards_N), _at_least_float32(values_N)
    after_N = torch.zeros_like(values_N)
    after_N[:-1] = values_N[1:]
    after_N[_last(lengths_S)] = 0.0
    surprises_N = rewards_N + gamma * after_N - values_N
    advantages_N = _discounted(surprises_N, lengths_S, gamma * lam)
    return advantages_N, advantages_N + values_N


def returns_to_go(
    rewards_N: torch.Tensor, lengths_S: torch.Tensor, *, gamma: float
) -> torch.Tensor:
    """Return each token's reward plus the discounted later rewards of its response: (N,)."""
    return _discounted(_at_least_float32(rewards_N), lengths_S, gamma)


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

    A group of equal scores gives exactly zero, and so does a group of one.
    """
    return _Groups(scores_S, groups_S).centered_S


def group_normalized(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return scores minus their group's mean, over its deviation, (S,): GRPO, arXiv:2402.03300.

    The standard deviation is that of a sample (n - 1). There is no epsilon in the denominator, so
    the scale of rewards does not matter. A group whose deviation is only rounding gives exactly
    zero.
    """
    groups = _Groups(scores_S, groups_S)
    return groups.centered_S * _inverse(groups.deviation_S(), groups.largest_S())


def without_signal(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return True for responses whose group's scores are equal within rounding, (S,) bool."""
    groups = _Groups(scores_S, groups_S)
    return _inverse(groups.deviation_S(), groups.largest_S()) == 0


def leave_one_out(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Return scores minus the mean of their group's others, (S,): RLOO, arXiv:2402.14740, eq. 8.

    Equal to n / (n - 1) times the centred scores. A group of one has no others and gives zero.
    """
    groups = _Groups(scores_S, groups_S)
    return groups.centered_S * groups.count_S / (groups.count_S - 1).clamp(min=1)


def whiten(values_N: torch.Tensor) -> torch.Tensor:
    """Normalise to mean 0 and deviation 1 (sample, n - 1); equal values give exactly zero."""
    values_N = _at_least_float32(values_N)
    return group_normalized(values_N, torch.zeros_like(values_N, dtype=torch.int64))


def overlong_penalty(
    lengths_S: torch.Tensor, *, limit: int, buffer: int, most: float
) -> torch.Tensor:
    """Return the soft length penalty to add to each response's score, (S,) float32.

    DAPO, arXiv:2503.14476, eq. 13: 0 up to `limit - buffer` tokens, then linear to `-most` at the
    limit.

    Args:
        lengths_S: tokens of each response, observations included, none above the limit.
        limit: token limit of a response, `rollout.max_new_tokens`.
        buffer: number of tokens before the limit with a penalty; 0: no penalty.
        most: penalty at the limit.
    """
    if buffer == 0:
        return torch.zeros(len(lengths_S), dtype=torch.float32, device=lengths_S.device)
    over_S = (lengths_S - (limit - buffer)).clamp(min=0).float()
    return -most * over_S / buffer


class _Groups:
    """Statistics of groups, repeated for each member: every tensor here is (S,).

    Scores are taken relative to the smallest one of their group. Equal scores then centre to
    exactly zero; otherwise the mean of three times 0.1 would differ from 0.1 by rounding.
    """

    def __init__(self, scores_S: torch.Tensor, groups_S: torch.Tensor) -> None:
        self._scores_S = _at_least_float32(scores_S)
        names_G, self._group_S = groups_S.unique(return_inverse=True)
        self._groups = len(names_G)
        self.count_S = self._sum(torch.ones_like(self._scores_S))
        above_S = self._scores_S - self._extreme(self._scores_S, "amin")
        self.centered_S = above_S - self._sum(above_S) / self.count_S

    def deviation_S(self) -> torch.Tensor:
        """Standard deviation of a sample; 0 for a group of one."""
        squares_S = self._sum(self.centered_S.square())
        return (squares_S / (self.count_S - 1).clamp(min=1)).sqrt()

    def largest_S(self) -> torch.Tensor:
        """Largest absolute score of the group."""
        return self._extreme(self._scores_S.abs(), "amax")

    def _sum(self, values_S: torch.Tensor) -> torch.Tensor:
        return values_S.new_zeros(self._groups).index_add(0, self._group_S, values_S)[self._group_S]

    def _extreme(self, values_S: torch.Tensor, reduce: str) -> torch.Tensor:
        extreme_G = values_S.new_zeros(self._groups).scatter_reduce(
            0, self._group_S, values_S, reduce, include_self=False
        )
        return extreme_G[self._group_S]


def _inverse(deviation_S: torch.Tensor, largest_S: torch.Tensor) -> torch.Tensor:
    """Return 1 / deviation, or 0 where the deviation is no more than rounding of the scores."""
    rounding_S = 4 * torch.finfo(deviation_S.dtype).eps * largest_S
    signal_S = deviation_S > rounding_S
    return torch.where(signal_S, 1 / deviation_S.where(signal_S, 1.0), 0.0)


def _discounted(values_N: torch.Tensor, lengths_S: torch.Tensor, decay: float) -> torch.Tensor:
    """Return x_t + decay x_{t+1} + decay^2 x_{t+2} + ... within each response.

    All responses at once, from the last token of the longest one backwards; the padding is zero and
    adds nothing.
    """
    places_N = _places(lengths_S)
    longest = int(lengths_S.max()) if len(lengths_S) else 0
    padded_LS = values_N.new_zeros(longest * len(lengths_S)).index_copy(0, places_N, values_N)
    padded_LS = padded_LS.view(longest, len(lengths_S))
    for t in range(longest - 2, -1, -1):
        padded_LS[t] += decay * padded_LS[t + 1]
    return padded_LS.view(-1)[places_N]


def _places(lengths_S: torch.Tensor) -> torch.Tensor:
    """Return each token's index in a flattened (L, S) table with one column per response: (N,)."""
    responses = len(lengths_S)
    column_N = torch.arange(responses, device=lengths_S.device).repeat_interleave(lengths_S)
    starts_S = lengths_S.cumsum(0) - lengths_S
    token_N = torch.arange(len(column_N), device=lengths_S.device)
    return (token_N - starts_S[column_N]) * responses + column_N


def _last(lengths_S: torch.Tensor) -> torch.Tensor:
    """Return the index of each response's last token: (S,)."""
    return lengths_S.cumsum(0) - 1


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
