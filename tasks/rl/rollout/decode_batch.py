"""A batch of sequences that grow together: padded on the left, with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.rl.experience.responses import Generated


@dataclass(frozen=True)
class Asked:
    """One reply to be made: the prompt's token ids, and the numbers that decide its draws."""

    ids: NDArray[np.int32]
    uniform: NDArray[np.float64]

    @classmethod
    def nothing(cls, limit: int) -> Asked:
        """One token, to keep other ranks company with."""
        return cls(np.zeros(1, np.int32), np.zeros(limit))


@dataclass
class Growing:
    """Sequences that grow together: B of them.

    Attributes:
        ids: (B, t) what the next forward pass reads: prompts first, then the last tokens.
        mask: (B, T) 1 where a token is, 0 where padding is.
        uniform: (B, limit) draws in [0, 1).
        cache: keys and values so far.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    uniform: torch.Tensor
    cache: Any

    @classmethod
    def of(cls, batch: Sequence[Asked], device: torch.device) -> Growing:
        """Prompts padded on the left."""
        from transformers import DynamicCache

        longest = max(len(one.ids) for one in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, longest - len(one.ids) :] = torch.from_numpy(one.ids.astype(np.int64))
            mask[row, longest - len(one.ids) :] = 1
        uniform = torch.from_numpy(np.stack([one.uniform for one in batch]))
        return cls(ids.to(device), mask.to(device), uniform.to(device), DynamicCache())

    def forward(self, module: Any) -> torch.Tensor:
        """(B, V) logits after the last token."""
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
        """Go on with one more token each."""
        self.ids = token_B[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(self.ids)], dim=1)


def cut(tokens_BT: torch.Tensor, logprobs_BT: torch.Tensor, ends: torch.Tensor) -> list[Generated]:
    """Each reply up to and with its end token."""
    ending = torch.isin(tokens_BT, ends).cpu().numpy()
    tokens = tokens_BT.cpu().numpy().astype(np.int32)
    logprobs = logprobs_BT.float().cpu().numpy()
    found = []
    for row in range(len(tokens)):
        ended = bool(ending[row].any())
        count = int(ending[row].argmax()) + 1 if ended else tokens.shape[1]
        found.append(Generated(tokens[row, :count], logprobs[row, :count], ended))
    return found
