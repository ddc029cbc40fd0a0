"""Objectives by name: one file each, imported when asked for.

An objective turns one micro-batch into a *sum* of losses. What it is divided by (the weight of the
whole global batch) is the loop's business, so that the result does not depend on how samples are
spread over ranks and accumulation steps.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from tasks.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tasks.training.batches import MicroBatch

_MODULES = {"sft": "tasks.training.objectives.sft"}


class Objective(Protocol):
    """What one objective module offers."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Sum of the losses of all supervised tokens of the micro-batch; a scalar in fp32."""
        ...


def objective(name: str) -> Objective:
    """The objective of that name.

    Raises:
        ConfigError: when there is none.
    """
    if name not in _MODULES:
        raise ConfigError(
            f"train.objective={name} is not an objective",
            hint=f"train.objective={'|'.join(sorted(_MODULES))}",
        )
    found: Objective = importlib.import_module(_MODULES[name])
    return found
