"""Algorithms by name. Each one is a choice of formulas and of options of section `rl`.

ppo                     arXiv:1707.06347   GAE with a critic
grpo                    arXiv:2402.03300   scores normalised within their group
dapo                    arXiv:2503.14476   as grpo, with a mean over tokens
dr_grpo                 arXiv:2503.20783   scores centred within their group; length-independent
rloo                    arXiv:2402.14740   scores minus the mean of the group's others
reinforce_pp            arXiv:2501.03262   returns normalised over the iteration
reinforce_pp_baseline   ibid.              the same, of scores minus the group's mean
gspo                    arXiv:2507.18071   as grpo, with one ratio per response
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tasks.core.errors import ConfigError, first_and_more
from tasks.rl.algorithms import estimators
from tasks.rl.algorithms.algorithm_options import GROUPED, TERMS, WITH_CRITIC, findings
from tasks.rl.algorithms.batch import Advantages, Batch
from tasks.rl.algorithms.policy_loss import PolicyLoss
from tasks.rl.settings import Loop


@dataclass(frozen=True)
class Recipe:
    """An algorithm.

    Attributes:
        name: its name in `train.objective`.
        advantages: estimates the advantages; every rank gets the same from the same batch.
    """

    name: str
    advantages: Callable[[Batch, Loop], Advantages]

    @property
    def critic(self) -> bool:
        """True if the algorithm has a critic."""
        return self.name in WITH_CRITIC

    @property
    def groups(self) -> bool:
        """True if responses to the same prompt are compared."""
        return self.name in GROUPED

    def policy_loss(self, loop: Loop, *, kl_coef: float | None = None) -> PolicyLoss:
        """Return the policy loss that section `rl` describes."""
        coef = loop.kl_coef if kl_coef is None else kl_coef
        return PolicyLoss(
            ratio=TERMS[self.name].ratio,
            aggregate=TERMS[self.name].aggregate,
            clip_low=loop.clip_low,
            clip_high=loop.clip_high,
            dual_clip=loop.dual_clip,
            kl_coef=coef if loop.kl_in == "loss" else 0.0,
            kl_estimator=loop.kl_estimator,
            entropy_coef=loop.entropy_coef,
        )


_RECIPES = (
    Recipe("ppo", estimators.by_critic),
    Recipe("grpo", estimators.by_normalized_group),
    Recipe("dapo", estimators.by_normalized_group),
    Recipe("dr_grpo", estimators.by_centered_group),
    Recipe("rloo", estimators.by_leave_one_out),
    Recipe("reinforce_pp", estimators.by_returns),
    Recipe("reinforce_pp_baseline", estimators.by_returns_above_group),
    Recipe("gspo", estimators.by_normalized_group),
)
ALGORITHMS: Mapping[str, Recipe] = {algorithm.name: algorithm for algorithm in _RECIPES}


def recipe(name: str, loop: Loop) -> Recipe:
    """Return the algorithm of that name, after checking section `rl` against it.

    Raises:
        ConfigError: options that the algorithm does not use, groups of one response where groups
            are compared, or values that contradict each other: all of them at once.
    """
    problems = [str(problem) for problem in findings(name, loop)]
    if problems:
        raise ConfigError(first_and_more(problems), details=problems)
    return ALGORITHMS[name]
