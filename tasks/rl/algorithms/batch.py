"""What the formulas are given and give back.

Ragged data is flat: the tokens of all replies end to end, reply by reply. Shape suffixes: N reply
tokens and S replies of an iteration (n and s: of one packed row). Log-probabilities
are natural, in nats, at the temperature that was sampled with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """All replies of an iteration, over all ranks.

    Attributes:
        lengths_S: int64, tokens of each reply, at least 1.
        groups_S: int64, replies to the same prompt carry the same number.
        scores_S: what each reply was worth, the penalty for length included.
        old_N: log-probabilities under the policy before its update, as the trainer has them; None
            where the update itself measures them, see `Updater.measures`.
        sampled_N: the same tokens as the rollout engine had them.
        reference_N: under the reference model, where one was asked.
        values_N: of the critic before its update, where there is one.
        kl_coef: weight of the distance to the reference, this iteration's.
    """

    lengths_S: torch.Tensor
    groups_S: torch.Tensor
    scores_S: torch.Tensor
    old_N: torch.Tensor | None
    sampled_N: torch.Tensor
    reference_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    kl_coef: float = 0.0


@dataclass(frozen=True)
class Estimated:
    """What an algorithm makes of a `Batch`.

    Attributes:
        advantages_N: how much better each token was than expected.
        returns_N: what the critic is to say of each token; None without a critic.
    """

    advantages_N: torch.Tensor
    returns_N: torch.Tensor | None = None


@dataclass(frozen=True)
class Totals:
    """Counts of a whole minibatch, over all its rows and ranks: what sums are divided by.

    Attributes:
        tokens: of all replies.
        sequences: replies.
        max_new_tokens: the longest reply that there could have been.
    """

    tokens: int
    sequences: int
    max_new_tokens: int
