"""Advantage estimation of each algorithm: functions of a `Batch` and section `rl`.

The score of a response is the reward of its last token. With an environment, its reward of a turn
is that of the turn's last token, and the rest of the score that of the episode's last one; discount
and GAE run over the sampled tokens in order, and observations between them take no time. Estimators
by groups use the sum over the episode. With `rl.kl_in=reward` the KL to the reference is subtracted
from the reward of every token.
"""

from __future__ import annotations

import torch

from tasks.rl.algorithms import advantages
from tasks.rl.algorithms.batch import Advantages, Batch
from tasks.rl.algorithms.kl import estimate
from tasks.rl.settings import Loop


def by_critic(batch: Batch, loop: Loop) -> Advantages:
    """PPO: GAE over the tokens' rewards, arXiv:1707.06347 and 1506.02438."""
    assert batch.values_N is not None
    advantages_N, returns_N = advantages.gae(
        _token_rewards(batch, loop, batch.scores_S),
        batch.values_N,
        batch.lengths_S,
        gamma=loop.gamma,
        lam=loop.gae_lambda,
    )
    return Advantages(advantages.whiten(advantages_N) if loop.whiten else advantages_N, returns_N)


def by_normalized_group(batch: Batch, loop: Loop) -> Advantages:
    """GRPO, DAPO and GSPO: scores normalised within their group."""
    scores_S = _response_scores(batch, loop)
    return _for_all_tokens(advantages.group_normalized(scores_S, batch.groups_S), batch)


def by_centered_group(batch: Batch, loop: Loop) -> Advantages:
    """Dr. GRPO: scores minus their group's mean."""
    scores_S = _response_scores(batch, loop)
    return _for_all_tokens(advantages.group_centered(scores_S, batch.groups_S), batch)


def by_leave_one_out(batch: Batch, loop: Loop) -> Advantages:
    """RLOO: scores minus the mean of the other scores of their group."""
    scores_S = advantages.leave_one_out(_response_scores(batch, loop), batch.groups_S)
    plain = _for_all_tokens(scores_S, batch)
    return Advantages(advantages.whiten(plain.advantages_N)) if loop.whiten else plain


def by_returns(batch: Batch, loop: Loop) -> Advantages:
    """REINFORCE++, arXiv:2501.03262, sec. 3: returns, normalised over the whole iteration."""
    return _whitened_returns(batch, loop, batch.scores_S)


def by_returns_above_group(batch: Batch, loop: Loop) -> Advantages:
    """REINFORCE++ with baseline, ibid.: as `by_returns`, of scores minus their group's mean."""
    return _whitened_returns(batch, loop, advantages.group_centered(batch.scores_S, batch.groups_S))


def _whitened_returns(batch: Batch, loop: Loop, scores_S: torch.Tensor) -> Advantages:
    rewards_N = _token_rewards(batch, loop, scores_S)
    returns_N = advantages.returns_to_go(rewards_N, batch.lengths_S, gamma=loop.gamma)
    return Advantages(advantages.whiten(returns_N))


def _for_all_tokens(advantages_S: torch.Tensor, batch: Batch) -> Advantages:
    return Advantages(advantages.spread(advantages_S, batch.lengths_S))


def _token_rewards(batch: Batch, loop: Loop, scores_S: torch.Tensor) -> torch.Tensor:
    """Return the reward of every token: (N,)."""
    if batch.turns_N is None:
        rewards_N = advantages.on_last_token(scores_S, batch.lengths_S)
    else:
        rest_S = scores_S - advantages.sums(batch.turns_N, batch.lengths_S)
        rewards_N = batch.turns_N + advantages.on_last_token(rest_S, batch.lengths_S)
    kl_N = _kl(batch, loop)
    return rewards_N if kl_N is None else rewards_N - batch.kl_coef * kl_N


def _response_scores(batch: Batch, loop: Loop) -> torch.Tensor:
    """Return the scores of whole responses, minus the weighted KL of their tokens: (S,)."""
    kl_N = _kl(batch, loop)
    if kl_N is None:
        return batch.scores_S
    return batch.scores_S - batch.kl_coef * advantages.sums(kl_N, batch.lengths_S)


def _kl(batch: Batch, loop: Loop) -> torch.Tensor | None:
    """Return the estimated KL to the reference, (N,); None if it is not part of the reward."""
    if loop.kl_in != "reward" or batch.kl_coef == 0:
        return None
    assert batch.reference_N is not None
    assert batch.old_N is not None, "with a reference the update does not measure it"
    return estimate(batch.old_N, batch.reference_N, loop.kl_estimator)
