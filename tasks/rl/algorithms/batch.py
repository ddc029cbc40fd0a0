"""Input and output of the formulas.

Ragged data is flat: the tokens of all responses one after another. Shape suffixes: N response
tokens and S responses of an iteration (n and s: of one packed row). Log-probabilities are natural,
in nats, at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """All responses of an iteration, over all ranks.

    With an environment N are the sampled tokens of all turns: a token whose successor comes after
    an observation is followed, here, by that successor.

    Attributes:
        lengths_S: int64, tokens of each response, at least 1.
        groups_S: int64, equal for responses to the same prompt.
        scores_S: reward of each response, minus the penalty for length.
        old_N: log-probabilities by the trainer before the update; None if the update itself
            measures them, see `Updater.measures`.
        sampled_N: log-probabilities by the rollout engine.
        reference_N: log-probabilities by the reference, if there is one.
        values_N: values by the critic before the update, if there is one.
        kl_coef: weight of the KL to the reference in this iteration.
        turns_N: the part of `scores_S` that an environment gave, at the last token of each turn;
            None without one.
    """

    lengths_S: torch.Tensor
    groups_S: torch.Tensor
    scores_S: torch.Tensor
    old_N: torch.Tensor | None
    sampled_N: torch.Tensor
    reference_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    kl_coef: float = 0.0
    turns_N: torch.Tensor | None = None


@dataclass(frozen=True)
class Advantages:
    """Output of an algorithm.

    Attributes:
        advantages_N: advantage of each token.
        returns_N: the critic's target for each token; None without a critic.
    """

    advantages_N: torch.Tensor
    returns_N: torch.Tensor | None = None


@dataclass(frozen=True)
class Totals:
    """Counts over all rows and ranks of a minibatch: the denominators of means.

    Attributes:
        tokens: response tokens.
        sequences: responses.
        max_new_tokens: token limit of a response.
    """

    tokens: int
    sequences: int
    max_new_tokens: int
