"""Sample and score one iteration's responses, and share them with all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.rl.environment import NAME, Episodes
from tasks.rl.experience import gather_responses
from tasks.rl.metrics import Clock, groups_without_signal
from tasks.rl.prompts import PromptOrder, request_seed
from tasks.rl.responses import Prompt, Request, Response, ScoredResponse
from tasks.rl.rewards import Rewards
from tasks.rl.rollout.engine import Engine
from tasks.training.engine.deepspeed_engine import Ranks


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
    ) -> tuple[list[ScoredResponse], int]:
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
            collected = _refilled(collected, no_signal, fresh)
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
    ) -> list[ScoredResponse]:
        """Return `samples` responses to each of these prompts, from all ranks.

        Group g holds the responses to prompt `numbers[g]`. It is sampled with the seed of number
        `first` + g of the iteration (0: an evaluation), so a prompt that occurs twice gets
        different responses.
        """
        groups = range(self.ranks.rank, len(numbers), self.ranks.world_size)
        prompts = [self.prompts[numbers[g]] for g in groups]
        requests = self.requests(numbers, iteration, samples, first=first)
        by_request = self._respond(requests, prompts, clock, greedy)
        owned = [(g, r) for g, some in zip(groups, by_request, strict=True) for r in some]
        with clock.phase("score"):
            totals, parts = self.rewards.score([response for _, response in owned])
        mine = []
        for i, (g, response) in enumerate(owned):
            own = {name: float(values[i]) for name, values in parts.items()}
            total = float(totals[i])
            if response.turns:
                played = sum(turn.reward for turn in response.turns)
                total, own = total + played, {NAME: played, **own}
            mine.append((numbers[g], ScoredResponse(response, g, total, own)))
        return gather_responses(self.ranks, mine, self.prompts)

    def requests(
        self, numbers: Sequence[int], iteration: int, samples: int, *, first: int = 0
    ) -> list[Request]:
        """Return this rank's share of the requests of `sample`, whose arguments it has."""
        return [
            Request(self.prompts[numbers[g]].ids, samples,
                    request_seed(self.seed, iteration, first + g))
            for g in range(self.ranks.rank, len(numbers), self.ranks.world_size)
        ]  # fmt: skip

    def _respond(
        self, requests: Sequence[Request], prompts: Sequence[Prompt], clock: Clock, greedy: bool
    ) -> list[list[Response]]:
        """Return the responses to each request; with an environment, whole episodes."""
        if self.episodes is not None:
            return self.episodes.play(requests, prompts, clock, greedy=greedy)
        with clock.phase("generate"):
            generated = self.engine.generate(requests, greedy=greedy)
        decode = self.tokenizer.decode
        return [
            [Response(prompt, g, decode(g.ids, skip_special_tokens=True)) for g in some]
            for prompt, some in zip(prompts, generated, strict=True)
        ]


def _refilled(
    collected: Sequence[ScoredResponse], no_signal: Sequence[int], fresh: Sequence[ScoredResponse]
) -> list[ScoredResponse]:
    """Replace groups without signal by groups of `fresh` that have one, in order."""
    useful = sorted({response.group for response in fresh} - set(groups_without_signal(fresh)))
    new_group = dict(zip(useful, no_signal, strict=False))
    kept = [response for response in collected if response.group not in new_group.values()]
    moved = [
        replace(response, group=new_group[response.group])
        for response in fresh
        if response.group in new_group
    ]
    return sorted([*kept, *moved], key=lambda response: response.group)
