"""Split an iteration's responses into optimizer steps, ranks and rows."""

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
    """This rank's rows of one optimizer step, and the totals over all rows and ranks."""

    rows: list[list[int]]
    totals: Totals


@dataclass(frozen=True)
class MinibatchDealer:
    """Deals an iteration's responses to optimizer steps.

    Attributes:
        settings: seed and batch sizes of the run.
        passes: passes over all responses (PPO epochs).
        max_new_tokens: token limit of a response.
    """

    settings: Settings
    passes: int
    max_new_tokens: int

    def minibatches(
        self, iteration: int, experience: Experience, ranks: Ranks
    ) -> Iterator[Minibatch]:
        """Yield this rank's minibatches of all passes, each pass in an order of its own.

        Rows have about equally many tokens. The rest of a pass that fills no minibatch is left out.
        """
        size = self.settings.batch.global_batch_size
        lengths = experience.examples.lengths.sum(axis=1)
        count = self.settings.batch.accumulation(ranks.world_size) * ranks.world_size
        for number in range(self.passes):
            order = np.random.default_rng([self.settings.seed, iteration, number])
            places = order.permutation(len(lengths))
            for start in range(0, len(places) - size + 1, size):
                chosen = places[start : start + size]
                rows = deal(lengths[chosen], count)[ranks.rank :: ranks.world_size]
                tokens = int(experience.lengths[torch.from_numpy(chosen)].sum())
                totals = Totals(tokens, size, self.max_new_tokens)
                yield Minibatch([[int(chosen[i]) for i in row] for row in rows], totals)
