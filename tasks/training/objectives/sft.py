"""Supervised fine-tuning: negative log-likelihood of the answer's tokens, given all before them."""

from __future__ import annotations

import torch
from torch import nn

from tasks.training.batches import IGNORE, MicroBatch


def loss_sum(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Sum of the cross-entropies (nats) over supervised tokens; scalar, fp32.

    Only the logits that a loss needs are turned into fp32: `labels[:, t]` is predicted by
    position t-1, and positions whose next token is not supervised are dropped first.
    """
    logits_BTV = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).logits
    targets_BT = batch.labels[:, 1:]
    supervised = targets_BT != IGNORE
    logits_NV = logits_BTV[:, :-1][supervised].float()
    return nn.functional.cross_entropy(logits_NV, targets_BT[supervised], reduction="sum")
