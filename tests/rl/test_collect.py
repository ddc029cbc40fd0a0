"""Asking and scoring: the same replies on any number of ranks, and groups without signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tasks.rl.experience.collect import Clock, Collector, silent_groups
from tasks.rl.experience.prompts import Asking
from tasks.rl.experience.responses import Generated, Prompt, Reply, Request
from tasks.rl.rewards import Rewards
from tasks.rl.rewards.sources import Weighted
from tests.rl.making import TOKENIZER
from tests.rl.peers import on_ranks

PROMPTS = [
    Prompt({"id": f"p{n}", "messages": [{"role": "user", "content": str(n)}]}, np.arange(1, n + 2))
    for n in range(12)
]
LETTERS = TOKENIZER("abcdefgh", add_special_tokens=False)["input_ids"]


@dataclass
class Drawing:
    """An engine of random letters, which the seed of a request decides."""

    asked: list[int] = field(default_factory=list)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        self.asked += [len(one.ids) - 1 for one in requests]
        return [[self._draw(one, n, greedy) for n in range(one.samples)] for one in requests]

    @staticmethod
    def _draw(request: Request, number: int, greedy: bool) -> Generated:
        draw = np.random.default_rng(0 if greedy else [request.seed, number])
        ids = draw.choice(LETTERS, draw.integers(1, 5)).astype(np.int32)
        return Generated(ids, np.log(draw.random(len(ids))).astype(np.float32), True)


@dataclass(frozen=True)
class Judge:
    """A source of rewards."""

    rule: Callable[[Reply], float]
    who: str = "the test"

    def __call__(self, replies: Sequence[Reply]) -> list[float]:
        return [self.rule(one) for one in replies]

    def close(self) -> None: ...


def collector(ranks: Any, rule: Callable[[Reply], float], engine: Drawing) -> Collector:
    rewards = Rewards([Weighted("function", 2.0, Judge(rule))])
    return Collector(engine, rewards, PROMPTS, TOKENIZER, ranks, 3)  # type: ignore[arg-type]


def number_of(reply: Reply) -> int:
    return int(reply.prompt.messages[0]["content"])


def collect(
    asking: Asking, rule: Callable[[Reply], float], *, world: int = 1, samples: int = 4
) -> list[tuple[list[Any], list[int]]]:
    """What every rank knows of iteration 1, and the prompts that it asked itself."""

    def work(ranks: Any) -> tuple[list[Any], list[int]]:
        engine = Drawing()
        known = collector(ranks, rule, engine).collect(1, asking, samples, Clock())
        return known, engine.asked

    return on_ranks(world, work)


def told(known: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (number, one.group, one.reward, one.reply.text, one.reply.generated.logprobs.tobytes())
        for number, one in known
    ]


@pytest.mark.parametrize("spare", [0, 2])
def test_replies_do_not_depend_on_who_asks(spare: int) -> None:
    asking = Asking(len(PROMPTS), 4, spare, seed=1)

    def rule(reply: Reply) -> float:
        return float(number_of(reply) % 3 == 0 and reply.text.startswith(("a", "b", "c")))

    ((alone, _),) = collect(asking, rule)
    for world in (2, 3):
        ranks = collect(asking, rule, world=world)
        assert len(ranks) == world
        for known, asked in ranks:
            assert told(known) == told(alone)
            assert len(asked) < (1 + spare) * 4, "each rank asks its share"


def test_rewards_are_weighted_and_their_parts_kept() -> None:
    ((known, asked),) = collect(Asking(len(PROMPTS), 3, 0, seed=0), lambda r: len(r.text))
    assert len(known) == 12
    assert len(asked) == 3
    for number, one in known:
        assert one.reply.prompt is PROMPTS[number]
        assert one.parts == {"function": float(len(one.reply.text))}
        assert one.reward == 2 * len(one.reply.text)
        assert one.reply.text == TOKENIZER.decode(one.reply.generated.ids)


def test_only_groups_without_signal_are_refilled() -> None:
    """Prompts 0 to 5 have a signal, the others none."""
    asking = Asking(len(PROMPTS), 4, 2, seed=4)

    def rule(reply: Reply) -> float:
        return len(reply.text) + ord(reply.text[0]) if number_of(reply) < 6 else 1.0

    rounds = [asking.numbers(1, round_).tolist() for round_ in range(3)]
    ((known, asked),) = collect(asking, rule)
    numbers = [known[4 * group][0] for group in range(4)]
    silent = [group for group, number in enumerate(rounds[0]) if number >= 6]
    assert 0 < len(silent) < 4, "the seed makes it a test"
    for group in set(range(4)) - set(silent):
        assert numbers[group] == rounds[0][group]
    spare = [n for n in rounds[1][: len(silent)] if n < 6]
    left = len(silent) - len(spare)
    spare += [n for n in rounds[2][:left] if n < 6] if left else []
    refilled = [numbers[group] for group in silent]
    assert refilled[: len(spare)] == spare
    assert refilled[len(spare) :] == [rounds[0][group] for group in silent[len(spare) :]]
    assert [one.group for _, one in known] == [g for g in range(4) for _ in range(4)]
    assert asked[:4] == rounds[0]
    assert len(asked) == 4 + len(silent) + left


def test_nothing_is_asked_twice_where_all_groups_have_a_signal() -> None:
    ((_, asked),) = collect(
        Asking(len(PROMPTS), 4, 2, seed=0), lambda r: int.from_bytes(r.text.encode())
    )
    assert len(asked) == 4


def test_without_any_signal_the_groups_stay_and_it_ends() -> None:
    asking = Asking(len(PROMPTS), 4, 2, seed=0)
    ((known, asked),) = collect(asking, lambda _: 1.0)
    assert silent_groups(known) == [0, 1, 2, 3]
    assert [known[4 * g][0] for g in range(4)] == asking.numbers(1).tolist()
    assert len(asked) == 12


def test_seconds_are_added_up_by_phase() -> None:
    clock = Clock()

    def work(ranks: Any) -> None:
        asked = collector(ranks, lambda _: 1.0, Drawing())
        asked.collect(1, Asking(len(PROMPTS), 2, 1, seed=0), 2, clock)

    on_ranks(1, work)
    assert set(clock.seconds) == {"generate", "score"}
    assert all(spent >= 0 for spent in clock.seconds.values())
