"""The score head of a reward model: one number at the last token of a sequence.

It is trained in full, in the dtype of the model. DeepSpeed keeps a model in one dtype (beside fp32
master weights), and so does the served class: only in this dtype does the head reach serving
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from tasks.training.model.gather_params import gathered

MODULE = "score"
"""Name of the head in every decoder's `*ForSequenceClassification` of transformers."""
WEIGHT = f"{MODULE}.weight"


def config_of_head(pad: int | None) -> dict[str, Any]:
    """Return the settings of config.json: one label, used as a number."""
    return {"num_labels": 1, "problem_type": "regression", "pad_token_id": pad}


def padding_id(pad: int | None, ends: Collection[int]) -> int | None:
    """Return the padding id of config.json, by which transformers finds the last token.

    It is None if texts end with the same id: transformers would then score one token too early.
    Without the id it refuses padded batches; packed rows need no padding.
    """
    return None if pad in ends else pad


def fill_head(model: Any, *, seed: int) -> None:
    """Initialise the head, equally on every rank and under every ZeRO stage.

    Weights are normal with variance 1 / (hidden + 1), so that scores begin at about unit size
    (Stiennon et al. 2020, arXiv:2009.01325, app. B.1).

    Args:
        model: a model with a score head of one label.
        seed: seed of the random weights.
    """
    weight = model.score.weight
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1] + 1)
    with gathered([weight]), torch.no_grad():
        weight.copy_(values)
