"""How much better a token or a reply was than expected: pure functions of rewards.

Suffixes: N reply tokens, S replies, see `batch.py`. Half-precision input is computed in float32.
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

    A_t = sum over k of (gamma lam)^k d_{t+k}, with d_t = r_t + gamma V_{t+1} - V_t. Every reply
    ends an episode: nothing is expected after its last token, cut off or not.

    Args:
        rewards_N: of each token.
        values_N: what the critic expected before each token.
        lengths_S: tokens of each reply.
        gamma: discount of later rewards, by token.
        lam: 0 trusts the critic for everything after the token, 1 trusts it for nothing.

    Returns:
        Advantages (N,), and returns (N,) = advantages + values, which the critic learns.
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
    """Sum of a token's reward and of all later ones of its reply, discounted: (N,)."""
    return _discounted(_at_least_float32(rewards_N), lengths_S, gamma)


def on_last_token(scores_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Rewards (N,) that are zero but for each reply's last token, which carries its score."""
    rewards_N = scores_S.new_zeros(int(lengths_S.sum()))
    rewards_N[_last(lengths_S)] = scores_S
    return rewards_N


def spread(per_reply_S: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Each reply's number on all of its tokens: (N,)."""
    return per_reply_S.repeat_interleave(lengths_S)


def sums(per_token_N: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """Sum over each reply's tokens: (S,)."""
    owner_N = torch.arange(len(lengths_S), device=lengths_S.device).repeat_interleave(lengths_S)
    zeros_S = per_token_N.new_zeros(len(lengths_S))
    return zeros_S.index_add(0, owner_N, per_token_N)


def group_centered(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Scores less their group's mean, (S,): Dr. GRPO, arXiv:2503.20783, sec. 3.2.

    A group of equal scores gives exactly zero, and so does a group of one.
    """
    return _Groups(scores_S, groups_S).centered_S


def group_normalized(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Scores less their group's mean over its standard deviation, (S,): GRPO, arXiv:2402.03300.

    The deviation is that of a sample (n - 1). There is no epsilon under the fraction, so that the
    scale of rewards does not matter: a group whose deviation is nothing but rounding has no signal,
    and gives exactly zero.
    """
    groups = _Groups(scores_S, groups_S)
    return groups.centered_S * _inverse(groups.deviation_S(), groups.largest_S())


def leave_one_out(scores_S: torch.Tensor, groups_S: torch.Tensor) -> torch.Tensor:
    """Scores less the mean of the *others* of their group, (S,): RLOO, arXiv:2402.14740, eq. 8.

    Equal to n / (n - 1) times the centred scores. A group of one has no others, and gives zero.
    """
    groups = _Groups(scores_S, groups_S)
    return groups.centered_S * groups.count_S / (groups.count_S - 1).clamp(min=1)


def whiten(values_N: torch.Tensor) -> torch.Tensor:
    """To mean 0 and standard deviation 1 (of a sample, n - 1); equal values give exactly zero."""
    values_N = _at_least_float32(values_N)
    return group_normalized(values_N, torch.zeros_like(values_N, dtype=torch.int64))


class _Groups:
    """Sums over groups, spread back to their members: everything here is (S,).

    Scores are taken relative to their group's smallest one: equal scores are then zeros, and their
    mean is the same zero, which it would not be of three times 0.1.
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

    def _sum(self, of_S: torch.Tensor) -> torch.Tensor:
        return of_S.new_zeros(self._groups).index_add(0, self._group_S, of_S)[self._group_S]

    def _extreme(self, of_S: torch.Tensor, which: str) -> torch.Tensor:
        found_G = of_S.new_zeros(self._groups).scatter_reduce(
            0, self._group_S, of_S, which, include_self=False
        )
        return found_G[self._group_S]


def _inverse(deviation_S: torch.Tensor, largest_S: torch.Tensor) -> torch.Tensor:
    """1 / deviation, and 0 where the deviation is no more than rounding of the numbers' size."""
    rounding_S = 4 * torch.finfo(deviation_S.dtype).eps * largest_S
    signal_S = deviation_S > rounding_S
    return torch.where(signal_S, 1 / deviation_S.where(signal_S, 1.0), 0.0)


def _discounted(of_N: torch.Tensor, lengths_S: torch.Tensor, decay: float) -> torch.Tensor:
    """x_t + decay x_{t+1} + decay^2 x_{t+2} + ... within each reply.

    One pass from the longest reply's last token to the first, all replies at once; the zeros past
    a reply's end add nothing.
    """
    places_N = _places(lengths_S)
    longest = int(lengths_S.max()) if len(lengths_S) else 0
    padded_LS = of_N.new_zeros(longest * len(lengths_S)).index_copy(0, places_N, of_N)
    padded_LS = padded_LS.view(longest, len(lengths_S))
    for t in range(longest - 2, -1, -1):
        padded_LS[t] += decay * padded_LS[t + 1]
    return padded_LS.view(-1)[places_N]


def _places(lengths_S: torch.Tensor) -> torch.Tensor:
    """Where each token lies in an (L, S) rectangle of which every column is a reply: (N,)."""
    replies = len(lengths_S)
    column_N = torch.arange(replies, device=lengths_S.device).repeat_interleave(lengths_S)
    starts_S = lengths_S.cumsum(0) - lengths_S
    token_N = torch.arange(len(column_N), device=lengths_S.device)
    return (token_N - starts_S[column_N]) * replies + column_N


def _last(lengths_S: torch.Tensor) -> torch.Tensor:
    """Number of each reply's last token: (S,)."""
    return lengths_S.cumsum(0) - 1


def _at_least_float32(of: torch.Tensor) -> torch.Tensor:
    return of.to(torch.promote_types(of.dtype, torch.float32))
