"""The frame of a run: steps, evaluations, checkpoints, the best one, early stopping. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from tasks.config.defaults import ONLINE
from tasks.core.errors import ConfigError
from tasks.core.events import emit, keep_in
from tasks.training.engine.checkpoint import Best, Progress, name_of
from tasks.training.job import Evaluate, Settings, TrainJob

_PAIRS = {
    "accuracy": 1, "margin": 1, "reward_chosen": 1, "reward_rejected": -1,
    "logp_chosen": 1, "logp_rejected": -1,
}  # fmt: skip
_RESPONSES = {"reward": 1}
METRICS: Mapping[str, Mapping[str, int]] = {
    "sft": {},
    "reward": {"accuracy": 1, "margin": 1},
    "dpo": _PAIRS,
    "simpo": _PAIRS,
    "orpo": {**_PAIRS, "log_odds": 1},
    "kto": {"reward_desirable": 1, "reward_undesirable": -1},
    **dict.fromkeys(ONLINE, _RESPONSES),
}
"""Metrics for `train.best_metric` beside `loss`, by objective; 1: larger is better, -1: smaller is.
Objectives that learn from sampled responses have rewards and no evaluation loss."""


def direction(objective: str, metric: str) -> int:
    """Return 1 if larger values of the metric are better, -1 if smaller ones are."""
    measured = METRICS[objective]
    known = measured if measured is _RESPONSES else {"loss": -1, **measured}
    if metric not in known:
        raise ConfigError(
            f"train.best_metric={metric} is not a metric of train.objective={objective}",
            hint=f"train.best_metric={'|'.join(known)}",
        )
    return known[metric]


def judge(progress: Progress, measures: Mapping[str, float], how: Evaluate, sign: int) -> bool:
    """Record an evaluation; return True if it is the best so far, which NaN never is."""
    progress.evaluations.append({"step": float(progress.step), **measures})
    value = measures[how.best_metric]
    better = progress.best is None or sign * value > sign * progress.best.value
    if not better or math.isnan(value):
        progress.waited += 1
        return False
    progress.best = Best(progress.step, value)
    progress.waited = 0
    return True


def has_ended(progress: Progress, how: Evaluate, last: int) -> bool:
    """Return True after the last step, or too many evaluations without improvement."""
    return progress.step >= last or 0 < how.early_stop_patience <= progress.waited


def due(every: int, step: int) -> bool:
    """Return True if the step is a multiple of `every`; 0 means never."""
    return bool(every) and step % every == 0


def evaluate_if_due(
    progress: Progress,
    settings: Settings,
    last: int,
    evaluate: Callable[[str], Mapping[str, float]],
) -> bool:
    """Evaluate the weights after a step if it is due; return True if a checkpoint is due, too.

    The last step has one, so that a failure to measure or write what was trained costs no step.
    """
    how, improved = settings.evaluate, False
    if due(how.eval_steps, progress.step) or progress.step == last:
        sign = direction(settings.objective, how.best_metric)
        measures = evaluate("after" if progress.step == last else "during")
        improved = judge(progress, measures, how, sign)
    if has_ended(progress, how, last):
        return settings.save_steps > 0
    wanted = improved and (how.keep == "best" or settings.save_steps > 0)
    return wanted or due(settings.save_steps, progress.step)


def may_save(settings: Settings, step: int) -> bool:
    """Return True if a checkpoint may follow a step: due, or of the best evaluation."""
    how = settings.evaluate
    judged = due(how.eval_steps, step) and (how.keep == "best" or settings.save_steps > 0)
    return judged or due(settings.save_steps, step)


def run_steps(
    job: TrainJob,
    progress: Progress,
    last: int,
    epochs: float,
    *,
    first: bool,
    step: Callable[[int], dict[str, float]],
    evaluate: Callable[[str], dict[str, float]],
    save: Callable[[bool], None],
    load: Callable[[Path], None],
) -> dict[str, float]:
    """Take the remaining steps up to `last`, with evaluations and checkpoints between them.

    Returns the evaluation of the weights that the engine then has: the last ones or the best ones,
    as `train.keep` says. The `first` rank emits the events "plan" and "step". `step` returns the
    metrics of a step, `save` is told whether the run has ended, `load` gets a checkpoint.
    """
    settings, how = job.settings, job.settings.evaluate
    if first:
        keep_in(job.checkpoints)
        emit("plan", steps=last, epochs=epochs, taken=progress.step)
    if progress.before is None:
        progress.before = evaluate("before")
    while not has_ended(progress, how, last):
        record = progress.last = step(progress.step + 1)
        progress.step += 1
        progress.losses.append(record.get("loss", record.get("value_loss", 0.0)))
        progress.seconds += record["step_s"]
        if first and (due(settings.log_every, progress.step) or progress.step == last):
            emit("step", **record)
        if evaluate_if_due(progress, settings, last, evaluate):
            save(has_ended(progress, how, last))
    best = progress.best
    if how.keep == "last" or best is None or best.step == progress.step:
        return {k: v for k, v in progress.evaluations[-1].items() if k != "step"}
    load(job.checkpoints / name_of(best.step))
    return evaluate("best")
