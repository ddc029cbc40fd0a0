"""Full tensors of a model that ZeRO-3 may have partitioned, for reading or for writing.

All ranks enter and leave these contexts together. Below ZeRO-3 they do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn


def whole(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Gather these parameters on every rank within the context; changes to them are lost."""
    return _gather(parameters, writer=None)


def gathered(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Gather these parameters for writing; every rank has to write the same values."""
    return _gather(parameters, writer=0)


def _gather(
    parameters: Sequence[nn.Parameter], *, writer: int | None
) -> contextlib.AbstractContextManager[Any]:
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=writer
    )
    return context
