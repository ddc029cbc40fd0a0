"""The policy's loss: a clipped ratio times the advantage, and the forms that others gave it.

PPO arXiv:1707.06347, eq. 7; the two sides of the clip apart: DAPO arXiv:2503.14476, eq. 10; a bound
for bad replies: dual clip arXiv:1912.09729, eq. 5; one ratio for a whole reply: GSPO
arXiv:2507.18071, eq. 7. Suffixes: n tokens and s replies of one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.rl.algorithms.batch import Totals
from tasks.rl.algorithms.kl import estimate
from tasks.training.objectives import Loss

RATIOS = ("token", "sequence")
AGGREGATES = ("tokens", "sequences", "constant")


@dataclass(frozen=True)
class Given:
    """What a row of packed replies is judged with, beside the policy's own log-probabilities.

    Attributes:
        old_n: log-probabilities before the update.
        advantages_n: see `Estimated`.
        weights_n: of the correction, see `correction.weights`.
        owner_n: int64, 0 to s - 1, the reply of the row that each token belongs to.
        lengths_s: int64, tokens of the row's replies.
        totals: of the minibatch.
        reference_n: log-probabilities under the reference, where there is one.
        entropy_n: of the policy's distribution at each token, in nats and with its gradient, where
            it is asked for.
    """

    old_n: torch.Tensor
    advantages_n: torch.Tensor
    weights_n: torch.Tensor
    owner_n: torch.Tensor
    lengths_s: torch.Tensor
    totals: Totals
    reference_n: torch.Tensor | None = None
    entropy_n: torch.Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """-mean of min(ratio * A, clipped ratio * A) + kl_coef * KL - entropy_coef * entropy.

    Attributes:
        ratio: `token`: new over old probability of each token; `sequence`: their geometric mean
            over the reply, on all of its tokens, which then need one and the same advantage.
        aggregate: what "mean" is. `tokens`: of all tokens (DAPO eq. 12); `sequences`: of replies'
            means (GRPO, arXiv:2402.03300, eq. 3: a token of a long reply counts less); `constant`:
            the sum over replies x max_new_tokens (Dr. GRPO, arXiv:2503.20783: no reply's length
            matters). The distance to the reference is taken likewise, the entropy always by tokens.
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: and at 1 + clip_high.
        dual_clip: where A < 0 a token's objective is at least `dual_clip` * A; None: no bound.
        kl_coef: weight of the distance to the reference in this loss; 0: it is only measured.
        kl_estimator: see `kl.py`.
        entropy_coef: weight of the entropy, in nats a token.
    """

    ratio: str = "token"
    aggregate: str = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __call__(self, logprobs_n: torch.Tensor, given: Given) -> Loss:
        """This row's part of the minibatch's loss.

        Args:
            logprobs_n: of the replies' tokens under the policy, with gradient.
            given: what they are judged with.

        Returns:
            The loss, and measures that add up over rows and ranks to means over the minibatch:
            `policy_loss` (without KL and entropy); by token `approx_kl` (from the old policy, k3),
            `ratio`, `clip_low_frac` and `clip_high_frac` (clipped on that side, so that the token
            has no gradient); and where they were given `kl` (from the reference, k3, nats) and
            `entropy` (nats).
        """
        share_n = self._shares(given)
        ratio_n = self._ratio(logprobs_n - given.old_n, given)
        objective_n = given.weights_n * self._clipped(ratio_n, given.advantages_n)
        policy = -(share_n * objective_n).sum()
        value = policy
        if self.kl_coef:
            assert given.reference_n is not None
            distance_n = estimate(logprobs_n, given.reference_n, self.kl_estimator)
            value = value + self.kl_coef * (share_n * distance_n).sum()
        if self.entropy_coef:
            assert given.entropy_n is not None
            value = value - self.entropy_coef * given.entropy_n.sum() / given.totals.tokens
        measures = self._measures(logprobs_n.detach(), ratio_n.detach(), given)
        return Loss(value, {"policy_loss": policy.detach(), **measures})

    def _shares(self, given: Given) -> torch.Tensor:
        """What a token counts in the minibatch's mean: (n,), or () where all count the same."""
        totals, like = given.totals, given.advantages_n
        if self.aggregate == "tokens":
            return like.new_tensor(1 / totals.tokens)
        if self.aggregate == "constant":
            return like.new_tensor(1 / (totals.sequences * totals.max_new_tokens))
        return 1 / (given.lengths_s.to(like.dtype) * totals.sequences)[given.owner_n]

    def _ratio(self, log_ratio_n: torch.Tensor, given: Given) -> torch.Tensor:
        if self.ratio == "token":
            return log_ratio_n.exp()
        zeros_s = log_ratio_n.new_zeros(len(given.lengths_s))
        mean_s = zeros_s.index_add(0, given.owner_n, log_ratio_n) / given.lengths_s
        return mean_s.exp()[given.owner_n]

    def _clipped(self, ratio_n: torch.Tensor, advantages_n: torch.Tensor) -> torch.Tensor:
        """The objective of each token, to be made large."""
        kept_n = ratio_n.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective_n = torch.minimum(ratio_n * advantages_n, kept_n * advantages_n)
        if self.dual_clip is None:
            return objective_n
        bound_n = self.dual_clip * advantages_n
        return torch.where(advantages_n < 0, torch.maximum(objective_n, bound_n), objective_n)

    def _measures(
        self, logprobs_n: torch.Tensor, ratio_n: torch.Tensor, given: Given
    ) -> dict[str, torch.Tensor]:
        low_n = (ratio_n < 1 - self.clip_low) & (given.advantages_n < 0)
        high_n = (ratio_n > 1 + self.clip_high) & (given.advantages_n > 0)
        found = {
            "approx_kl": estimate(given.old_n, logprobs_n, "k3"),
            "ratio": ratio_n,
            "clip_low_frac": low_n.to(ratio_n.dtype),
            "clip_high_frac": high_n.to(ratio_n.dtype),
        }
        if given.reference_n is not None:
            found["kl"] = estimate(logprobs_n, given.reference_n, "k3")
        if given.entropy_n is not None:
            found["entropy"] = given.entropy_n.detach()
        return {name: of_n.sum() / given.totals.tokens for name, of_n in found.items()}
