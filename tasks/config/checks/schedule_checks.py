"""The course of training: where it begins, what it evaluates, which state it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.config.checks.finding import Finding
from tasks.core.errors import ConfigError
from tasks.training.resume import newest
from tasks.training.selection import direction

_KNOBS = {
    "min_lr_ratio": (0.0, ("cosine_with_min_lr", "polynomial", "warmup_stable_decay")),
    "decay_ratio": (0.1, ("warmup_stable_decay",)),
    "power": (1.0, ("polynomial",)),
    "num_cycles": (1, ("cosine_with_restarts",)),
}
"""Of the schedules: what they are when nobody sets them, and who heeds them."""


def evaluation(train: Mapping[str, Any]) -> list[Finding]:
    """The metric has to be one that is measured, and the best of one evaluation is no choice."""
    found = []
    try:
        direction(train["objective"], train["best_metric"])
    except ConfigError as error:
        what = f"{train['best_metric']} with train.objective={train['objective']}"
        allowed = error.hint.replace("train.best_metric=", "").replace("|", ", ")
        found.append(Finding("train.best_metric", what, allowed, "train.best_metric=loss"))
    if train["eval_steps"]:
        return found
    if train["keep"] == "best":
        found.append(_without_evaluations("train.keep", "best", "train.keep=last"))
    if train["early_stop_patience"]:
        patience = str(train["early_stop_patience"])
        override = "train.early_stop_patience=0"
        found.append(_without_evaluations("train.early_stop_patience", patience, override))
    return found


def _without_evaluations(key: str, value: str, override: str) -> Finding:
    what = f"{value} with train.eval_steps=0"
    allowed = "needs evaluations in the course of training"
    return Finding(key, what, allowed, f"train.eval_steps=<steps> or {override}")


def schedule(train: Mapping[str, Any]) -> list[Finding]:
    """A knob that the chosen schedule does not heed is a mistake."""
    found = []
    for name, (default, heeding) in _KNOBS.items():
        if train[name] != default and train["scheduler"] not in heeding:
            what = f"{train[name]:g} with train.scheduler={train['scheduler']}"
            allowed = f"only {', '.join(heeding)} heed{'s' * (len(heeding) == 1)} it"
            override = f"train.{name}={default:g} or train.scheduler={heeding[0]}"
            found.append(Finding(f"train.{name}", what, allowed, override))
    return found


def resume(how: str) -> list[Finding]:
    """A folder to go on from has to hold a complete checkpoint."""
    if how in ("auto", "never"):
        return []
    path = Path(how).expanduser()
    if newest(path) is not None:
        return []
    what = f"{path} holds no complete checkpoint" if path.is_dir() else f"{path} does not exist"
    allowed = "auto, never, or a folder step-????????"
    return [Finding("train.resume", what, allowed, "train.resume=auto")]
