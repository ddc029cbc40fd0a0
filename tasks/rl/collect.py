"""Sample and score one iteration's responses, and share them with all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tasks.rl.environment import NAME, Episodes
from tasks.rl.metrics import Clock, groups_without_signal
from tasks.rl.responses import Prompt, PromptOrder, Request, Response, request_seed
from tasks.rl.rewards import Rewards
from tasks.rl.rollout.engine import Engine
from tasks.training.engine.deepspeed_engine import Ranks

_UNSENT = Prompt({}, np.zeros(0, np.int32))


@dataclass(frozen=True)
class Collector:
    """Samples responses to prompts and scores them."""

    engine: Engine  # samples responses
    rewards: Rewards  # scores responses
    prompts: Sequence[Prompt]  # all prompts of the dataset
    tokenizer: Any  # decodes responses for rewards that read texts
    ranks: Ranks  # this process and its peers; each rank samples for its share of the prompts
    seed: int  # seed of the run
    episodes: Episodes | None = None  # plays the responses' episodes; None without an environment

    def collect(
        self, iteration: int, prompt_order: PromptOrder, start: int, samples: int, clock: Clock
    ) -> tuple[list[Response], int]:
        """Return the responses to one iteration's prompts by group, and the next prompt's position.

        A group is all responses to one prompt. If their rewards are equal, the group has no signal.
        With `rl.refill`, the next prompts replace such groups for some rounds; groups still without
        signal after the last round stay.
        """
        used = prompt_order.per_iteration
        numbers = prompt_order.numbers(start, used)
        collected = self.sample(numbers, iteration, samples, clock)
        for _ in range(prompt_order.refill_rounds):
            no_signal = groups_without_signal(collected)
            if not no_signal:
                break
            numbers = prompt_order.numbers(start + used, len(no_signal))
            fresh = self.sample(numbers, iteration, samples, clock, first=used)
            used += len(no_signal)
            useful = sorted({r.group for r in fresh} - set(groups_without_signal(fresh)))
            moves = dict(zip(useful, no_signal, strict=False))
            collected = [r for r in collected if r.group not in moves.values()]
            collected += [replace(r, group=moves[r.group]) for r in fresh if r.group in moves]
            collected.sort(key=lambda response: response.group)
        return collected, start + used

    def sample(
        self,
        numbers: Sequence[int],
        iteration: int,
        samples: int,
        clock: Clock,
        *,
        first: int = 0,
        greedy: bool = False,
    ) -> list[Response]:
        """Return `samples` responses to each of these prompts, from all ranks, by group.

        Group g holds the responses to prompt `numbers[g]`. It is sampled with the seed of number
        `first` + g of the iteration (0: an evaluation), so a prompt that occurs twice gets
        different responses.
        """
        requests = self.requests(numbers, iteration, samples, first=first)
        groups = [g for g in self._groups(numbers) for _ in range(samples)]
        prompts = [self.prompts[numbers[g]] for g in groups]
        responses = self._respond(requests, prompts, clock, greedy)
        mine = [replace(r, group=g) for g, r in zip(groups, responses, strict=True)]
        with clock.phase("score"):
            mine = self.rewards.score(mine)
        for i, response in enumerate(mine):
            if response.turns:
                played = sum(turn.reward for turn in response.turns)
                parts = {NAME: played, **response.parts}
                mine[i] = replace(response, reward=response.reward + played, parts=parts)
        # Prompts are not sent: all ranks have them.
        sent = [replace(response, prompt=_UNSENT) for response in mine]
        everyone = [response for part in self.ranks.all_objects(sent) for response in part]
        everyone = [replace(r, prompt=self.prompts[numbers[r.group]]) for r in everyone]
        return sorted(everyone, key=lambda response: response.group)

    def requests(
        self, numbers: Sequence[int], iteration: int, samples: int, *, first: int = 0
    ) -> list[Request]:
        """Return this rank's share of the requests of `sample`, whose arguments it has."""
        return [
            Request(self.prompts[numbers[g]].ids, request_seed(self.seed, iteration, first + g), n)
            for g in self._groups(numbers)
            for n in range(samples)
        ]

    def _groups(self, numbers: Sequence[int]) -> range:
        """Return the groups that this rank samples."""
        return range(self.ranks.rank, len(numbers), self.ranks.world_size)

    def _respond(
        self, requests: Sequence[Request], prompts: Sequence[Prompt], clock: Clock, greedy: bool
    ) -> list[Response]:
        """Return the response to each request; with an environment, a whole episode."""
        if self.episodes is not None:
            return self.episodes.play(requests, prompts, clock, greedy=greedy)
        with clock.phase("generate"):
            generated = self.engine.generate(requests, greedy=greedy)
        decode = self.tokenizer.decode
        return [
            Response(prompt, g, decode(g.ids, skip_special_tokens=True))
            for prompt, g in zip(prompts, generated, strict=True)
        ]
