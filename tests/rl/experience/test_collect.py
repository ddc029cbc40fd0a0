"""Sampling and scoring: the same responses on any number of ranks, and groups without signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tasks.rl.clock import Clock
from tasks.rl.experience.collect import Collector, groups_without_signal
from tasks.rl.experience.prompts import PromptOrder
from tasks.rl.experience.responses import Prompt, Request, Response, ScoredResponse
from tasks.rl.rewards import Rewards
from tasks.rl.rewards.sources import Weighted
from tasks.serving.vllm.colocation import Generated
from tests.rl.making import TOKENIZER, Judge, response
from tests.rl.peers import on_ranks

PROMPTS = [
    Prompt({"id": f"p{n}", "messages": [{"role": "user", "content": str(n)}]}, np.arange(1, n + 2))
    for n in range(12)
]
LETTERS = TOKENIZER("abcdefgh", add_special_tokens=False)["input_ids"]


@dataclass
class RandomLetters:
    """An engine that returns random letters, determined by the seed of a request."""

    sampled: list[int] = field(default_factory=list)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        self.sampled += [len(request.ids) - 1 for request in requests]
        return [
            [self._sample(request, n, greedy) for n in range(request.samples)]
            for request in requests
        ]

    @staticmethod
    def _sample(request: Request, number: int, greedy: bool) -> Generated:
        draw = np.random.default_rng(0 if greedy else [request.seed, number])
        ids = draw.choice(LETTERS, draw.integers(1, 5)).astype(np.int32)
        return Generated(ids, np.log(draw.random(len(ids))).astype(np.float32), True)


def number_of(response: Response) -> int:
    return int(response.prompt.messages[0]["content"])


def collect(
    prompt_order: PromptOrder,
    rule: Callable[[Response], float],
    world: int = 1,
) -> list[tuple[list[Any], list[int]]]:
    """Return what every rank knows of iteration 1, and the prompts that it sampled itself."""

    def work(ranks: Any) -> tuple[list[Any], list[int]]:
        engine, rewards = RandomLetters(), Rewards([Weighted("function", 2.0, Judge(rule))])
        collector = Collector(engine, rewards, PROMPTS, TOKENIZER, ranks, 3)  # type: ignore[arg-type]
        known, position = collector.collect(1, prompt_order, 0, 4, Clock())
        assert world > 1 or position == len(engine.sampled), "every prompt taken is sampled"
        return known, engine.sampled

    return on_ranks(world, work)


def told(known: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (number, s.group, s.reward, s.response.text, s.response.generated.logprobs.tobytes())
        for number, s in known
    ]


@pytest.mark.parametrize("spare", [0, 2])
def test_responses_do_not_depend_on_the_rank(spare: int) -> None:
    prompt_order = PromptOrder(len(PROMPTS), 4, spare, seed=1)

    def rule(response: Response) -> float:
        return float(number_of(response) % 3 == 0 and response.text.startswith(("a", "b", "c")))

    ((alone, _),) = collect(prompt_order, rule)
    for number, scored in alone:
        assert scored.response.prompt is PROMPTS[number]
        assert scored.response.text == TOKENIZER.decode(scored.response.generated.ids)
        assert scored.parts == {"function": rule(scored.response)}
        assert scored.reward == 2 * rule(scored.response)
    for world in (2, 3):
        ranks = collect(prompt_order, rule, world)
        assert len(ranks) == world
        for known, sampled in ranks:
            assert told(known) == told(alone)
            assert len(sampled) < (1 + spare) * 4, "each rank samples its share"


def test_only_groups_without_signal_are_refilled() -> None:
    """Prompts 0 to 5 have a signal, the others have none."""
    prompt_order = PromptOrder(len(PROMPTS), 4, 2, seed=4)

    def rule(response: Response) -> float:
        return len(response.text) + ord(response.text[0]) if number_of(response) < 6 else 1.0

    first, later = prompt_order.numbers(0, 4), prompt_order.numbers(4, 8)
    ((known, sampled),) = collect(prompt_order, rule)
    numbers = [known[4 * group][0] for group in range(4)]
    silent = [group for group, number in enumerate(first) if number >= 6]
    assert 0 < len(silent) < 4, "the seed makes it a test"
    for group in set(range(4)) - set(silent):
        assert numbers[group] == first[group]
    spare = [n for n in later[: len(silent)] if n < 6]
    left = len(silent) - len(spare)
    spare += [n for n in later[len(silent) :][:left] if n < 6]
    refilled = [numbers[group] for group in silent]
    assert refilled[: len(spare)] == spare
    assert refilled[len(spare) :] == [first[group] for group in silent[len(spare) :]]
    assert [scored.group for _, scored in known] == [g for g in range(4) for _ in range(4)]
    assert sampled[:4] == first
    assert len(sampled) == 4 + len(silent) + left


def test_a_length_penalty_is_a_signal_and_rounding_is_none() -> None:
    """The signal is that of the scores that advantages are taken of."""
    known = [
        (0, ScoredResponse(response("say", "abc"), 0, 1.0)),
        (0, ScoredResponse(response("say", "ab"), 0, 1.0, penalty=-0.5)),
        (1, ScoredResponse(response("say", "abc"), 1, 0.1 + 0.2)),
        (1, ScoredResponse(response("say", "abc"), 1, 0.3)),
    ]
    assert groups_without_signal(known) == [1]


def test_groups_stay_if_no_prompt_has_a_signal() -> None:
    prompt_order = PromptOrder(len(PROMPTS), 4, 2, seed=0)
    ((known, sampled),) = collect(prompt_order, lambda _: 1.0)
    assert groups_without_signal(known) == [0, 1, 2, 3]
    assert [known[4 * g][0] for g in range(4)] == prompt_order.numbers(0, 4)
    assert len(sampled) == 12
