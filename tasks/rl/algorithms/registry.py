"""Algorithms by name. Each one is a choice of formulas and of options of section `rl`.

ppo                     arXiv:1707.06347   GAE with a critic
grpo                    arXiv:2402.03300   scores normalised within their group
dr_grpo                 arXiv:2503.20783   scores centred within their group; length-independent
rloo                    arXiv:2402.14740   scores minus the mean of the group's others
reinforce_pp            arXiv:2501.03262   returns normalised over the iteration
reinforce_pp_baseline   ibid.              the same, of scores minus the group's mean
gspo                    arXiv:2507.18071   as grpo, with one ratio per response
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import ConfigError, first_and_more
from tasks.rl.algorithms import estimators
from tasks.rl.algorithms.algorithm_options import GROUPED, WITH_CRITIC, findings
from tasks.rl.algorithms.batch import Advantages, Batch
from tasks.rl.algorithms.policy_loss import PolicyLoss
from tasks.rl.settings import Loop


@dataclass(frozen=True)
class Recipe:
    """An algorithm.

    Attributes:
        name: its name in `train.objective`.
        advantages: estimates the advantages; every rank gets the same from the same batch.
        ratio: of the policy loss, `token` or `sequence`.
        aggregate: of the policy loss: `tokens`, `sequences` or `constant`.
        defaults: options whose defaults differ from `Loop`'s; the configuration sets them.
    """

    name: str
    advantages: Callable[[Batch, Loop], Advantages]
    ratio: str = "token"
    aggregate: str = "tokens"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def critic(self) -> bool:
        """True if the algorithm has a critic."""
        return self.name in WITH_CRITIC

    @property
    def groups(self) -> bool:
        """True if responses to the same prompt are compared."""
        return self.name in GROUPED

    def policy_loss(self, loop: Loop, *, kl_coef: float | None = None) -> PolicyLoss:
        """Return the policy loss that section `rl` describes.

        Args:
            loop: the section.
            kl_coef: coefficient of this iteration if it is adaptive; None: the section's.
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
        # The mean ratio of a response varies little: clips of the paper, sec. 5.1.
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
)
ALGORITHMS: Mapping[str, Recipe] = {algorithm.name: algorithm for algorithm in _RECIPES}


def recipe(name: str, loop: Loop) -> Recipe:
    """Return the algorithm of that name, after checking section `rl` against it.

    Args:
        name: `train.objective`.
        loop: section `rl`.

    Raises:
        ConfigError: options that the algorithm does not use, groups of one response where groups
            are compared, or values that contradict each other: all of them at once.
    """
    problems = [str(problem) for problem in findings(name, loop)]
    if problems:
        raise ConfigError(first_and_more(problems), details=problems)
    return ALGORITHMS[name]
