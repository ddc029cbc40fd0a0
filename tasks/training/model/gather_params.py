"""Full tensors of a model that ZeRO-3 may have partitioned, for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn


def whole(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Gather these parameters on every rank within the context; changes to them are lost.

    All ranks enter and leave it together. Below ZeRO-3 this does nothing.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=None
    )
    return context
