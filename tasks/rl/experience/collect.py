"""One iteration's replies: asked, scored, and known to all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.rl.experience.packed_rows import together
from tasks.rl.experience.prompts import Asking, request_seed
from tasks.rl.experience.responses import Prompt, Reply, Request, Scored
from tasks.rl.rewards import Rewards
from tasks.rl.rollout.engines import Engine
from tasks.training.engine.deepspeed_engine import Ranks

Known = list[tuple[int, Scored]]
"""Replies, each with the number of its prompt in the dataset."""


@dataclass
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what happens within to the phase of that name."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


@dataclass(frozen=True)
class Collector:
    """Asks prompts and scores the replies.

    Attributes:
        engine: who answers.
        rewards: what an answer is worth.
        prompts: of the dataset.
        tokenizer: decodes replies for those who score texts.
        ranks: each asks its share.
        seed: of the run.
    """

    engine: Engine
    rewards: Rewards
    prompts: Sequence[Prompt]
    tokenizer: Any
    ranks: Ranks
    seed: int

    def collect(self, iteration: int, asking: Asking, samples: int, clock: Clock) -> Known:
        """Replies to one iteration's prompts, in the order of groups.

        A group whose replies are all worth the same has no signal. Where `asking` has spare rounds,
        other prompts take its place; what is still without signal after the last one stays.

        Args:
            iteration: 1, 2, ...
            asking: which prompts.
            samples: replies a prompt.
            clock: gets the seconds of `generate` and `score`.
        """
        known = self.ask(asking.numbers(iteration).tolist(), iteration, samples, clock)
        for round_ in range(1, asking.spare + 1):
            silent = silent_groups(known)
            if not silent:
                break
            numbers = asking.numbers(iteration, round_).tolist()[: len(silent)]
            first = round_ * asking.each
            fresh = self.ask(numbers, iteration, samples, clock, first=first)
            known = _refilled(known, silent, fresh)
        return known

    def ask(
        self,
        numbers: Sequence[int],
        iteration: int,
        samples: int,
        clock: Clock,
        *,
        first: int = 0,
        greedy: bool = False,
    ) -> Known:
        """Replies to these prompts, `samples` each, of all ranks; group g is `numbers[g]`.

        Group g draws as number `first` + g of the iteration, so that a prompt that is asked twice
        is answered twice.
        """
        world, rank = self.ranks.world_size, self.ranks.rank
        groups = range(rank, len(numbers), world)
        asked = [self.prompts[numbers[g]] for g in groups]
        seeds = [request_seed(self.seed, iteration, first + g) for g in groups]
        requests = [
            Request(prompt.ids, samples, seed) for prompt, seed in zip(asked, seeds, strict=True)
        ]
        with clock.phase("generate"):
            answered = self.engine.generate(requests, greedy=greedy)
        replies = [
            (g, Reply(self.prompts[numbers[g]], one, self._text(one.ids)))
            for g, several in zip(groups, answered, strict=True)
            for one in several
        ]
        with clock.phase("score"):
            total, parts = self.rewards.score([reply for _, reply in replies])
        mine = [
            (numbers[g], Scored(reply, g, float(total[i]), {k: float(parts[k][i]) for k in parts}))
            for i, (g, reply) in enumerate(replies)
        ]
        return together(self.ranks, mine, self.prompts)

    def _text(self, ids: Any) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def silent_groups(known: Known) -> list[int]:
    """Groups whose replies are all worth the same."""
    rewards: dict[int, list[float]] = {}
    for _, one in known:
        rewards.setdefault(one.group, []).append(one.reward)
    return [group for group, several in rewards.items() if np.ptp(several) == 0.0]


def _refilled(known: Known, silent: Sequence[int], fresh: Known) -> Known:
    """Groups of `fresh` with signal in the place of silent ones, in order."""
    useless = set(silent_groups(fresh))
    useful = sorted({one.group for _, one in fresh} - useless)
    places = dict(zip(useful, silent, strict=False))
    taken = set(places.values())
    kept = [(n, one) for n, one in known if one.group not in taken]
    moved = [
        (n, Scored(one.reply, places[one.group], one.reward, one.parts))
        for n, one in fresh
        if one.group in places
    ]
    return sorted([*kept, *moved], key=lambda pair: pair[1].group)
