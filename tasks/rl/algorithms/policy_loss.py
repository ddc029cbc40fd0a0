"""The policy loss: clipped ratio times advantage, and its variants.

PPO arXiv:1707.06347, eq. 7; different clips on the two sides: DAPO arXiv:2503.14476, eq. 10; a
bound for negative advantages: dual clip arXiv:1912.09729, eq. 5; one ratio per response: GSPO
arXiv:2507.18071, eq. 7. Shape suffixes: n tokens and s responses of one packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.rl.algorithms.batch import Totals
from tasks.rl.algorithms.kl import estimate
from tasks.training.losses import Loss

RATIOS = ("token", "sequence")


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the loss of one packed row, besides the policy's log-probabilities.

    Attributes:
        old_n: log-probabilities before the update.
        advantages_n: see `batch.Advantages`.
        weights_n: importance weights, see `correction.weights`.
        owner_n: int64, 0 to s - 1, the response in the row that each token belongs to.
        lengths_s: int64, tokens of each response.
        totals: of the minibatch.
        reference_n: log-probabilities by the reference, if there is one.
        entropy_n: entropy of the policy at each token, in nats and with gradient, if the loss
            needs it.
        kept_n: 1 for tokens that bear loss and count in `totals`, 0 for the others.
    """

    old_n: torch.Tensor
    advantages_n: torch.Tensor
    weights_n: torch.Tensor
    owner_n: torch.Tensor
    lengths_s: torch.Tensor
    totals: Totals
    reference_n: torch.Tensor | None = None
    entropy_n: torch.Tensor | None = None
    kept_n: torch.Tensor | float = 1.0


@dataclass(frozen=True)
class PolicyLoss:
    """-mean of min(ratio * A, clipped ratio * A) + kl_coef * KL - entropy_coef * entropy.

    Attributes:
        ratio: `token`: new over old probability of each token; `sequence`: their geometric mean
            over the response, for all of its tokens. All tokens then need the same advantage.
        aggregate: kind of mean. `tokens`: over all tokens (DAPO eq. 12); `sequences`: over the
            responses' means (GRPO, arXiv:2402.03300, eq. 3: a token of a long response counts
            less); `constant`: sum over responses x max_new_tokens (Dr. GRPO, arXiv:2503.20783: the
            length of a response does not matter). It applies to the KL too, but the entropy is
            always a mean over tokens.
        clip_low: the ratio is clipped at 1 - clip_low.
        clip_high: and at 1 + clip_high.
        dual_clip: where A < 0 the objective of a token is at least `dual_clip` * A; None: no bound.
        kl_coef: weight of the KL to the reference in this loss; 0: it is only measured.
        kl_estimator: see `kl.py`.
        entropy_coef: weight of the entropy, in nats per token.
    """

    ratio: str = "token"
    aggregate: str = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __call__(self, logprobs_n: torch.Tensor, inputs: LossInputs) -> Loss:
        """Return this row's part of the minibatch's loss.

        Returns:
            The loss, and metrics whose sums over rows and ranks are means over the minibatch:
            `policy_loss` (without KL and entropy); per token `approx_kl` (to the old policy, k3),
            `ratio`, `clip_low_frac` and `clip_high_frac` (share of tokens clipped on that side,
            which have no gradient); and if given `kl` (to the reference, k3, nats) and `entropy`
            (nats).
        """
        share_n = self._shares(inputs) * inputs.kept_n
        ratio_n = self._ratio(logprobs_n - inputs.old_n, inputs)
        objective_n = inputs.weights_n * self._clipped(ratio_n, inputs.advantages_n)
        policy = -(share_n * objective_n).sum()
        value = policy
        if self.kl_coef:
            assert inputs.reference_n is not None
            kl_n = estimate(logprobs_n, inputs.reference_n, self.kl_estimator)
            value = value + self.kl_coef * (share_n * kl_n).sum()
        if self.entropy_coef:
            assert inputs.entropy_n is not None
            entropy = (inputs.entropy_n * inputs.kept_n).sum() / inputs.totals.tokens
            value = value - self.entropy_coef * entropy
        measures = self._measures(logprobs_n.detach(), ratio_n.detach(), inputs)
        return Loss(value, {"policy_loss": policy.detach(), **measures})

    def _shares(self, inputs: LossInputs) -> torch.Tensor:
        """Return the weight of each token in the minibatch's mean: (n,), or () if all are equal."""
        totals, like = inputs.totals, inputs.advantages_n
        if self.aggregate == "tokens":
            return like.new_tensor(1 / totals.tokens)
        if self.aggregate == "constant":
            return like.new_tensor(1 / (totals.sequences * totals.max_new_tokens))
        return 1 / (inputs.lengths_s.to(like.dtype) * totals.sequences)[inputs.owner_n]

    def _ratio(self, log_ratio_n: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        if self.ratio == "token":
            return log_ratio_n.exp()
        zeros_s = log_ratio_n.new_zeros(len(inputs.lengths_s))
        mean_s = zeros_s.index_add(0, inputs.owner_n, log_ratio_n) / inputs.lengths_s
        return mean_s.exp()[inputs.owner_n]

    def _clipped(self, ratio_n: torch.Tensor, advantages_n: torch.Tensor) -> torch.Tensor:
        """Return the objective of each token, which training maximises."""
        clipped_n = ratio_n.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective_n = torch.minimum(ratio_n * advantages_n, clipped_n * advantages_n)
        if self.dual_clip is None:
            return objective_n
        bound_n = self.dual_clip * advantages_n
        return torch.where(advantages_n < 0, torch.maximum(objective_n, bound_n), objective_n)

    def _measures(
        self, logprobs_n: torch.Tensor, ratio_n: torch.Tensor, inputs: LossInputs
    ) -> dict[str, torch.Tensor]:
        low_n = (ratio_n < 1 - self.clip_low) & (inputs.advantages_n < 0)
        high_n = (ratio_n > 1 + self.clip_high) & (inputs.advantages_n > 0)
        metrics = {
            "approx_kl": estimate(inputs.old_n, logprobs_n, "k3"),
            "ratio": ratio_n,
            "clip_low_frac": low_n.to(ratio_n.dtype),
            "clip_high_frac": high_n.to(ratio_n.dtype),
        }
        if inputs.reference_n is not None:
            metrics["kl"] = estimate(logprobs_n, inputs.reference_n, "k3")
        if inputs.entropy_n is not None:
            metrics["entropy"] = inputs.entropy_n.detach()
        kept_n, tokens = inputs.kept_n, inputs.totals.tokens
        return {name: (values_n * kept_n).sum() / tokens for name, values_n in metrics.items()}
