"""The score head of a reward model: one number at a sequence's last token.

It is trained in full, in the dtype of the model around it. DeepSpeed holds a model in one dtype
(and the optimizer's master copy in fp32), the served class has one dtype too, and only a head that
is stored as it was computed survives every hand-off bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from typing import Any

import torch

MODULE = "score"
"""What transformers calls it in every decoder's `*ForSequenceClassification`."""
WEIGHT = f"{MODULE}.weight"


def config_of_head(pad: int | None) -> dict[str, Any]:
    """Settings of config.json: one label, a number and no probability."""
    return {"num_labels": 1, "problem_type": "regression", "pad_token_id": pad}


def padding_id(pad: int | None, ends: Collection[int]) -> int | None:
    """The padding id of config.json, by which transformers finds a sequence's last token.

    None where texts end with that very id: it would look one token too early. transformers then
    refuses to score padded batches, instead of scoring them wrongly; packed rows need no padding.
    """
    return None if pad in ends else pad


def fill_head(model: Any, *, seed: int) -> None:
    """Initialise the head alike on every rank and under every ZeRO stage.

    Normal with variance 1 / (hidden + 1), so that scores begin at about unit size (Stiennon et al.
    2020, arXiv:2009.01325, app. B.1).

    Args:
        model: with a head of one label.
        seed: of the draw.
    """
    weight = model.score.weight
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) / math.sqrt(shape[-1] + 1)
    with gathered([weight]), torch.no_grad():
        weight.copy_(values)


def gathered(parameters: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """The whole of these parameters, writable on every rank alike, partitioned by ZeRO-3 or not."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    found: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        parameters, modifier_rank=0
    )
    return found
