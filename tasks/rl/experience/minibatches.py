"""Which replies make an optimizer step, and which rank has which of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tasks.rl.algorithms.batch import Totals
from tasks.rl.experience.packed_rows import Experience
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Settings
from tasks.training.tokens.order import deal


class Minibatch(NamedTuple):
    """One optimizer step's replies: this rank's rows of them, and what all of them add up to."""

    rows: list[list[int]]
    totals: Totals


@dataclass(frozen=True)
class Dealing:
    """How an iteration's replies are dealt.

    Attributes:
        settings: of the run: seed and batch sizes.
        passes: over all replies.
        max_new_tokens: the longest reply that there could have been.
    """

    settings: Settings
    passes: int
    max_new_tokens: int

    def minibatches(self, iteration: int, got: Experience, ranks: Ranks) -> Iterator[Minibatch]:
        """Every pass in an order of its own, in rows of about equally many tokens; what is less
        than a whole minibatch at a pass's end is left out.
        """
        size = self.settings.batch.global_batch_size
        lengths = got.examples.lengths.sum(axis=1)
        count = self.settings.batch.accumulation(ranks.world_size) * ranks.world_size
        for number in range(self.passes):
            order = np.random.default_rng([self.settings.seed, iteration, number])
            places = order.permutation(len(lengths))
            for start in range(0, len(places) - size + 1, size):
                chosen = places[start : start + size]
                rows = deal(lengths[chosen], count)[ranks.rank :: ranks.world_size]
                tokens = int(got.lengths[torch.from_numpy(chosen)].sum())
                totals = Totals(tokens, size, self.max_new_tokens)
                yield Minibatch([[int(chosen[i]) for i in row] for row in rows], totals)
