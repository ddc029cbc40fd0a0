"""Algorithms by name: each is a choice of pieces, and of the knobs of section `rl` that it knows.

ppo                     arXiv:1707.06347   GAE with a critic
grpo                    arXiv:2402.03300   scores normalised in their group
dr_grpo                 arXiv:2503.20783   centred in their group; no reply's length matters
rloo                    arXiv:2402.14740   less the mean of the group's others
reinforce_pp            arXiv:2501.03262   returns normalised over the iteration
reinforce_pp_baseline   ibid.              the same, less the group's mean
gspo                    arXiv:2507.18071   as grpo, with one ratio a reply
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import ConfigError, first_and_more
from tasks.rl.algorithms import estimators
from tasks.rl.algorithms.algorithm_options import GROUPED, WITH_CRITIC, findings
from tasks.rl.algorithms.batch import Batch, Estimated
from tasks.rl.algorithms.policy_loss import PolicyLoss
from tasks.rl.settings import Loop


@dataclass(frozen=True)
class Recipe:
    """An algorithm.

    Attributes:
        name: of it.
        estimate: from replies to advantages.
        ratio: of the policy's loss, `token` or `sequence`.
        aggregate: of the policy's loss: `tokens`, `sequences` or `constant`.
        defaults: knobs whose usual values differ from `Loop`'s, for the configuration to set.
    """

    name: str
    estimate: Callable[[Batch, Loop], Estimated]
    ratio: str = "token"
    aggregate: str = "tokens"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def critic(self) -> bool:
        """Whether there is one."""
        return self.name in WITH_CRITIC

    @property
    def groups(self) -> bool:
        """Whether a reply is compared with others to the same prompt."""
        return self.name in GROUPED

    def advantages(self, batch: Batch, loop: Loop) -> Estimated:
        """What the update goes by. The same on every rank that is given the same batch."""
        return self.estimate(batch, loop)

    def policy_loss(self, loop: Loop, *, kl_coef: float | None = None) -> PolicyLoss:
        """The loss that section `rl` asks for.

        Args:
            loop: the section.
            kl_coef: of this iteration, where it is adaptive; None: the section's.
        """
        coef = loop.kl_coef if kl_coef is None else kl_coef
        return PolicyLoss(
            ratio=self.ratio,
            aggregate=self.aggregate,
            clip_low=loop.clip_low,
            clip_high=loop.clip_high,
            dual_clip=loop.dual_clip,
            kl_coef=coef if loop.kl_in == "loss" else 0.0,
            kl_estimator=loop.kl_estimator,
            entropy_coef=loop.entropy_coef,
        )


_IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}
_RECIPES = (
    Recipe("ppo", estimators.by_critic, defaults={**_IN_REWARD, "whiten": True}),
    Recipe("grpo", estimators.by_normalized_group, aggregate="sequences"),
    Recipe("dr_grpo", estimators.by_centered_group, aggregate="constant"),
    Recipe("rloo", estimators.by_leave_one_out, defaults=_IN_REWARD),
    Recipe("reinforce_pp", estimators.by_returns, defaults=_IN_REWARD),
    Recipe(
        "reinforce_pp_baseline",
        estimators.by_returns_above_group,
        defaults={"kl_estimator": "k2"},
    ),
    Recipe(
        "gspo",
        estimators.by_normalized_group,
        ratio="sequence",
        aggregate="sequences",
        # A mean over a whole reply hardly moves: the paper's limits, sec. 5.1.
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
)
ALGORITHMS: Mapping[str, Recipe] = {one.name: one for one in _RECIPES}


def recipe(name: str, loop: Loop) -> Recipe:
    """The algorithm of that name, once section `rl` was found to fit it.

    Raises:
        ConfigError: there is none; or all of: knobs that it does not use and that were changed,
            groups of one where replies are compared with each other, values that are no choice.
    """
    if name not in ALGORITHMS:
        raise ConfigError(
            f"train.objective={name} is not an algorithm",
            hint=f"train.objective={'|'.join(ALGORITHMS)}",
        )
    found = findings(name, loop)
    if found:
        problems = [str(finding) for finding in found]
        raise ConfigError(
            first_and_more(problems),
            details=problems,
            hint=" ".join(dict.fromkeys(finding.override for finding in found)),
        )
    return ALGORITHMS[name]
