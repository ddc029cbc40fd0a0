"""Which samples go into which step, rank and micro-batch; and micro-batches as tensors.

The order is a function of the seed alone, every rank knows all of it, and nothing about it is
communicated. Samples come as one endless stream, epoch after epoch, each in an order of its own;
 a step takes the next `global_batch_size` of them. Within a step they are sorted by length before
they are dealt out, so that little is padded and ranks that work at the same time have equal work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.training.chat import Sample
from tasks.training.job import Batch

IGNORE = -100
"""Label of a position that bears no loss."""


@dataclass(frozen=True)
class MicroBatch:
    """B samples padded on the right to T tokens; all tensors int64 of shape (B, T).

    `attention_mask` is None when nothing is padded. `supervised` counts tokens that bear loss.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None
    supervised: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        mask = self.attention_mask
        return MicroBatch(
            self.input_ids.to(device),
            self.labels.to(device),
            None if mask is None else mask.to(device),
            self.supervised,
        )


def collate(samples: Sequence[Sample], pad_id: int) -> MicroBatch:
    """Pad samples on the right to the longest of them."""
    longest = max(len(s.ids) for s in samples)
    shape = (len(samples), longest)
    ids: NDArray[np.int64] = np.full(shape, pad_id, np.int64)
    labels: NDArray[np.int64] = np.full(shape, IGNORE, np.int64)
    mask: NDArray[np.int64] = np.zeros(shape, np.int64)
    for row, sample in enumerate(samples):
        size = len(sample.ids)
        ids[row, :size] = sample.ids
        labels[row, sample.prompt : size] = sample.ids[sample.prompt :]
        mask[row, :size] = 1
    return MicroBatch(
        torch.from_numpy(ids),
        torch.from_numpy(labels),
        None if mask.all() else torch.from_numpy(mask),
        sum(s.supervised for s in samples),
    )


@dataclass(frozen=True)
class Step:
    """One optimizer step for one rank: its micro-batches, and what all ranks do together.

    Attributes:
        micro: sample indices, one tuple a micro-batch.
        supervised: tokens that bear loss, over all ranks and micro-batches.
        tokens: all tokens, over all ranks and micro-batches, padding not counted.
    """

    micro: tuple[tuple[int, ...], ...]
    supervised: int
    tokens: int


class Plan:
    """The order of a whole training run.

    Args:
        samples: all training samples, the same on every rank.
        batch: sizes and length of the run.
        seed: of the order.
        world_size: ranks.
    """

    def __init__(
        self, samples: Sequence[Sample], batch: Batch, *, seed: int, world_size: int
    ) -> None:
        self._lengths = np.array([len(s.ids) for s in samples])
        self._supervised = np.array([s.supervised for s in samples])
        self._batch = batch
        self._seed = seed
        self._world = world_size
        self._accumulation = batch.accumulation(world_size)
        by_epochs = math.ceil(batch.epochs * len(samples) / batch.global_batch_size)
        self.steps = max(1, by_epochs if batch.max_steps is None else batch.max_steps)

    def epoch_at(self, step: int) -> float:
        """Epochs of data seen once `step` steps were taken."""
        return step * self._batch.global_batch_size / len(self._lengths)

    def step(self, step: int, rank: int) -> Step:
        """What `rank` does in step number `step`, 1 to `steps`."""
        size, micro = self._batch.global_batch_size, self._batch.micro_batch_size
        chosen = self._stream((step - 1) * size, size)
        by_length = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        chunks = by_length.reshape(self._accumulation, self._world, micro)
        return Step(
            tuple(tuple(int(i) for i in chunk) for chunk in chunks[:, rank]),
            int(self._supervised[chosen].sum()),
            int(self._lengths[chosen].sum()),
        )

    def _stream(self, start: int, size: int) -> NDArray[np.int64]:
        n = len(self._lengths)
        epochs = range(start // n, (start + size - 1) // n + 1)
        orders = [np.random.default_rng([self._seed, e]).permutation(n) for e in epochs]
        offset = start - epochs[0] * n
        return np.concatenate(orders)[offset : offset + size]


def heldout_rounds(
    samples: Sequence[Sample], *, size: int, world_size: int, rank: int
) -> list[tuple[int, ...] | None]:
    """Held-out batches of one rank, as many for each rank; None where it only keeps in step.

    ZeRO-3 gathers parameters in every forward pass, so that all ranks have to make equally many.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    chunks: list[tuple[int, ...] | None] = [
        tuple(order[i : i + size]) for i in range(0, len(order), size)
    ]
    chunks += [None] * (-len(chunks) % world_size)
    return chunks[rank::world_size]
