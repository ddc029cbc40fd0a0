"""Whole tensors of a model that ZeRO-3 may have partitioned, for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn


def whole(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Within it these parameters are complete on every rank; changes of them are lost.

    All ranks enter and leave it together. Below stage 3 they are complete anyway.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    found: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=None
    )
    return found
