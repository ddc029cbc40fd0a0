"""Which evaluation is the best one, and when there is no point in going on. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tasks.core.errors import ConfigError
from tasks.training.engine.checkpoint import Best, Progress
from tasks.training.job import Evaluate

_PAIRS = {
    "accuracy": 1, "margin": 1, "reward_chosen": 1, "reward_rejected": -1,
    "logp_chosen": 1, "logp_rejected": -1,
}  # fmt: skip
_REPLIES = {"reward": 1}
METRICS: Mapping[str, Mapping[str, int]] = {
    "sft": {},
    "reward": {"accuracy": 1, "margin": 1},
    "dpo": _PAIRS,
    "simpo": _PAIRS,
    "orpo": {**_PAIRS, "log_odds": 1},
    "kto": {"reward_desirable": 1, "reward_undesirable": -1},
    "ppo": _REPLIES,
    "grpo": _REPLIES,
    "dr_grpo": _REPLIES,
    "rloo": _REPLIES,
    "reinforce_pp": _REPLIES,
    "reinforce_pp_baseline": _REPLIES,
    "gspo": _REPLIES,
}
"""By objective: what an evaluation can be best in beside `loss`; 1 where more is better. Replies
have rewards and no loss."""


def direction(objective: str, metric: str) -> int:
    """1 where more of the metric is better, -1 where less is.

    Raises:
        ConfigError: the objective does not measure it, or more of it is neither better nor worse.
    """
    measured = METRICS[objective]
    known = measured if measured is _REPLIES else {"loss": -1, **measured}
    if metric not in known:
        raise ConfigError(
            f"train.best_metric={metric}: train.objective={objective} cannot be best in that",
            hint=f"train.best_metric={'|'.join(known)}",
        )
    return known[metric]


def judge(progress: Progress, found: Mapping[str, float], how: Evaluate, sign: int) -> bool:
    """Take note of an evaluation; whether it is the best so far.

    A value that is not a number is never the best one.

    Args:
        progress: gets the evaluation, the best one, and how long that was ago.
        found: the evaluation's measures.
        how: names the metric.
        sign: `direction` of the metric.
    """
    progress.evaluations.append({"step": float(progress.step), **found})
    value = found[how.best_metric]
    better = progress.best is None or sign * value > sign * progress.best.value
    if not better or math.isnan(value):
        progress.waited += 1
        return False
    progress.best = Best(progress.step, value)
    progress.waited = 0
    return True


def has_stopped(progress: Progress, how: Evaluate) -> bool:
    """Whether there were too many evaluations without improvement."""
    return 0 < how.early_stop_patience <= progress.waited
