"""A batch of sequences that are decoded together: padded on the left, with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.serving.vllm.colocation import Generated


@dataclass(frozen=True)
class DecodeRequest:
    """One response to sample: the prompt's token ids, and one random number per new token.

    Attributes:
        ids: (P,) token ids.
        uniform: random numbers in [0, 1), at least `limit`, equally many in all of a batch.
        limit: token limit of the response.
    """

    ids: NDArray[np.int32]
    uniform: NDArray[np.float64]
    limit: int

    @classmethod
    def nothing(cls, limit: int) -> DecodeRequest:
        """Return a request of one token, for a rank that decodes only to join collective calls."""
        return cls(np.zeros(1, np.int32), np.zeros(limit), limit)


@dataclass
class DecodeBatch:
    """A batch of B sequences during decoding.

    Attributes:
        ids: (B, t) input of the next forward pass: the prompts first, then the last tokens.
        mask: (B, T) 1 for tokens, 0 for padding.
        uniform: (B, U) random numbers in [0, 1).
        cache: keys and values so far.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    uniform: torch.Tensor
    cache: Any

    @classmethod
    def of(cls, batch: Sequence[DecodeRequest], device: torch.device) -> DecodeBatch:
        """Return a batch of these prompts, padded on the left."""
        from transformers import DynamicCache

        longest = max(len(request.ids) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.ids) :] = torch.from_numpy(request.ids.astype(np.int64))
            mask[row, longest - len(request.ids) :] = 1
        uniform = torch.from_numpy(np.stack([request.uniform for request in batch]))
        return cls(ids.to(device), mask.to(device), uniform.to(device), DynamicCache())

    def forward(self, module: Any) -> torch.Tensor:
        """Return the logits after the last token, (B, V)."""
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -self.ids.shape[1] :]
        out = module(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def take(self, token_B: torch.Tensor) -> None:
        """Append one token to each sequence."""
        self.ids = token_B[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(self.ids)], dim=1)


def cut(
    tokens_BT: torch.Tensor, logprobs_BT: torch.Tensor, ends: torch.Tensor, limits: Sequence[int]
) -> list[Generated]:
    """Return each response up to and including its first end token, or up to its limit.

    Args:
        tokens_BT: sampled tokens.
        logprobs_BT: their log-probabilities.
        ends: ids of end tokens.
        limits: token limit of each response.
    """
    is_end = torch.isin(tokens_BT, ends).cpu().numpy()
    tokens = tokens_BT.cpu().numpy().astype(np.int32)
    logprobs = logprobs_BT.float().cpu().numpy()
    responses = []
    for row, limit in enumerate(limits):
        ended = bool(is_end[row, :limit].any())
        count = int(is_end[row].argmax()) + 1 if ended else min(limit, tokens.shape[1])
        responses.append(Generated(tokens[row, :count], logprobs[row, :count], ended))
    return responses
