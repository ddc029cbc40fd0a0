"""From a `Batch` to advantages: what the algorithms do before any loss.

The distance to the reference, where section `rl` wants it in the reward, is taken off token by
token; what a reply was worth lands on its last token.
"""

from __future__ import annotations

import torch

from tasks.rl.algorithms import advantages
from tasks.rl.algorithms.batch import Batch, Estimated
from tasks.rl.algorithms.kl import estimate
from tasks.rl.settings import Loop


def by_critic(batch: Batch, loop: Loop) -> Estimated:
    """PPO: GAE over the tokens' rewards, arXiv:1707.06347 and 1506.02438."""
    assert batch.values_N is not None
    advantages_N, returns_N = advantages.gae(
        _token_rewards(batch, loop, batch.scores_S),
        batch.values_N,
        batch.lengths_S,
        gamma=loop.gamma,
        lam=loop.lam,
    )
    return Estimated(advantages.whiten(advantages_N) if loop.whiten else advantages_N, returns_N)


def by_normalized_group(batch: Batch, loop: Loop) -> Estimated:
    """GRPO and GSPO: how many deviations a reply is above its group."""
    scores_S = _reply_scores(batch, loop)
    return _of_replies(advantages.group_normalized(scores_S, batch.groups_S), batch)


def by_centered_group(batch: Batch, loop: Loop) -> Estimated:
    """Dr. GRPO: how much a reply is above its group."""
    scores_S = _reply_scores(batch, loop)
    return _of_replies(advantages.group_centered(scores_S, batch.groups_S), batch)


def by_leave_one_out(batch: Batch, loop: Loop) -> Estimated:
    """RLOO: how much a reply is above the rest of its group."""
    scores_S = advantages.leave_one_out(_reply_scores(batch, loop), batch.groups_S)
    estimated = _of_replies(scores_S, batch)
    return Estimated(advantages.whiten(estimated.advantages_N)) if loop.whiten else estimated


def by_returns(batch: Batch, loop: Loop) -> Estimated:
    """REINFORCE++, arXiv:2501.03262, sec. 3: returns, normalised over the whole iteration."""
    return _whitened_returns(batch, loop, batch.scores_S)


def by_returns_above_group(batch: Batch, loop: Loop) -> Estimated:
    """REINFORCE++ with baseline, ibid.: scores less their group's mean, then as `by_returns`."""
    return _whitened_returns(batch, loop, advantages.group_centered(batch.scores_S, batch.groups_S))


def _whitened_returns(batch: Batch, loop: Loop, scores_S: torch.Tensor) -> Estimated:
    rewards_N = _token_rewards(batch, loop, scores_S)
    returns_N = advantages.returns_to_go(rewards_N, batch.lengths_S, gamma=loop.gamma)
    return Estimated(advantages.whiten(returns_N))


def _of_replies(advantages_S: torch.Tensor, batch: Batch) -> Estimated:
    return Estimated(advantages.spread(advantages_S, batch.lengths_S))


def _token_rewards(batch: Batch, loop: Loop, scores_S: torch.Tensor) -> torch.Tensor:
    """Rewards of every token: (N,)."""
    rewards_N = advantages.on_last_token(scores_S, batch.lengths_S)
    distance_N = _distance(batch, loop)
    return rewards_N if distance_N is None else rewards_N - batch.kl_coef * distance_N


def _reply_scores(batch: Batch, loop: Loop) -> torch.Tensor:
    """Scores of whole replies, less the distance of all of their tokens: (S,)."""
    distance_N = _distance(batch, loop)
    if distance_N is None:
        return batch.scores_S
    return batch.scores_S - batch.kl_coef * advantages.sums(distance_N, batch.lengths_S)


def _distance(batch: Batch, loop: Loop) -> torch.Tensor | None:
    """Estimated distance from the reference, (N,); None where it is no part of the reward."""
    if loop.kl_in != "reward" or batch.kl_coef == 0:
        return None
    assert batch.reference_N is not None
    assert batch.old_N is not None, "with a reference both are measured before the update"
    return estimate(batch.old_N, batch.reference_N, loop.kl_estimator)
