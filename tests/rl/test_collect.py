"""Prompts, sampling, scoring, experience: the same on any number of ranks, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks.core.errors import DataError
from tasks.rl import metrics
from tasks.rl.collect import Collector
from tasks.rl.experience import measure_tokens, pack_experience
from tasks.rl.responses import Prompt, PromptOrder, Request, Response, load_prompts
from tasks.rl.rewards import Rewards
from tasks.rl.update import minibatches
from tests.rl.making import TOKENIZER, Player, judge, on_ranks, response
from tests.settings import Batch, Loop, Settings
from tests.tiny import make_tokenizer


def written(folder: Path, *texts: str, role: str = "user") -> Path:
    """Write a prompt for each text, named r0, r1, ..."""
    path = folder / "train.jsonl"
    with path.open("w") as file:
        for number, text in enumerate(texts):
            row = {"id": f"r{number}", "messages": [{"role": role, "content": text}]}
            file.write(json.dumps(row) + "\n")
    return path


def load(path: Path, ranks: int = 1, tokenizer: Any = TOKENIZER) -> list[tuple[Prompt, ...]]:
    return on_ranks(ranks, lambda r: load_prompts(path, tokenizer=tokenizer, limit=55, ranks=r))


def test_every_rank_gets_every_prompt(tmp_path: Path) -> None:
    path = written(tmp_path, *("say " + "x" * n for n in range(7)))
    (alone,) = load(path)
    assert [prompt.row["id"] for prompt in alone] == [f"r{n}" for n in range(7)]
    for several in load(path, ranks=3):
        for mine, theirs in zip(alone, several, strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            assert mine.row == theirs.row
    text = "<|im_start|>user\nsay xxx<|im_end|>\n<|im_start|>assistant\n"
    assert alone[3].ids.tolist() == TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_prompts_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(written(tmp_path, *("x" * (n * 10) for n in range(6))), ranks=2)
    # 19 tokens around what the user says
    details = [detail.partition(" tokens")[0] for detail in caught.value.details]
    assert details == ["r4: 59", "r5: 69"]
    assert "rollout.max_prompt_len=69" in caught.value.hint
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    path = written(tmp_path, "be kind", role="system")
    with pytest.raises(DataError, match="r0: .*no system message"):
        load(path, tokenizer=tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="template"):
        load(path, tokenizer=tokenizer)


def test_each_epoch_has_every_prompt_once_in_its_own_order() -> None:
    order = PromptOrder(total=7, per_iteration=3, refill_rounds=0, seed=5)
    epochs = np.concatenate([order.numbers(3 * n, 3) for n in range(7)]).reshape(3, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # An iteration may be larger than the dataset.
    numbers = PromptOrder(total=3, per_iteration=7, refill_rounds=0, seed=0).numbers(0, 7)
    assert sorted(numbers[:3]) == sorted(numbers[3:6]) == [0, 1, 2]


PROMPTS = [
    Prompt({"id": f"p{n}", "messages": [{"role": "user", "content": str(n)}]}, np.arange(1, n + 2))
    for n in range(12)
]


def letters(request: Request) -> str:
    """Return a response that is determined by the seed of the request."""
    place = request.seed + request.number
    return "abcdefgh"[place % 8] * (1 + place % 3)


def number_of(response: Response) -> int:
    return int(response.prompt.messages[0]["content"])


def collect(
    order: PromptOrder, rule: Callable[[Response], float], world: int = 1
) -> list[tuple[list[Response], list[int]]]:
    """Return what every rank knows of iteration 1, and the prompts that it sampled itself."""

    def work(ranks: Any) -> tuple[list[Response], list[int]]:
        engine: Any = Player(letters)
        collector = Collector(engine, Rewards([judge(rule)]), PROMPTS, TOKENIZER, ranks, 3)
        known, position = collector.collect(1, order, 0, 4, metrics.Clock())
        asked = [request for requests in engine.seen for request in requests]
        sampled = [len(request.ids) - 1 for request in asked if request.number == 0]
        assert world > 1 or position == len(sampled), "every prompt taken is sampled"
        return known, sampled

    return on_ranks(world, work)


@pytest.mark.parametrize("spare", [0, 2])
def test_responses_do_not_depend_on_the_rank(spare: int) -> None:
    order = PromptOrder(len(PROMPTS), 4, spare, seed=1)

    def rule(response: Response) -> float:
        return float(number_of(response) % 3 == 0 and response.text.startswith(("a", "b", "c")))

    def told(known: list[Response]) -> list[tuple[Any, ...]]:
        return [(s.group, s.reward, s.text, id(s.prompt)) for s in known]

    ((alone, _),) = collect(order, rule)
    for scored in alone:
        assert scored.text == TOKENIZER.decode(scored.generated.ids, skip_special_tokens=True)
        assert scored.parts == {"function": rule(scored)}
        assert scored.reward == 2 * rule(scored)
    for known, sampled in collect(order, rule, 3):
        assert told(known) == told(alone)
        assert len(sampled) < (1 + spare) * 4, "each rank samples its share"


def test_only_groups_without_signal_are_refilled() -> None:
    """Prompts 0 to 5 have a signal, the others have none."""
    order = PromptOrder(len(PROMPTS), 4, 2, seed=4)

    def rule(response: Response) -> float:
        return len(response.text) + ord(response.text[0]) if number_of(response) < 6 else 1.0

    first, later = order.numbers(0, 4), order.numbers(4, 8)
    ((known, sampled),) = collect(order, rule)
    numbers = [number_of(known[4 * group]) for group in range(4)]
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
    assert [scored.group for scored in known] == [g for g in range(4) for _ in range(4)]
    assert sampled[:4] == first
    assert len(sampled) == 4 + len(silent) + left


TEXTS = ("a", "longer", "bc", "a long one", "d", "efgh", "i", "jk")
ENDS = (True, False, True, True, False, True, True, True)
"""False for the responses that the limit of tokens has cut."""


def scored(*, all_end: bool = True) -> list[Response]:
    """Eight responses of different lengths, two for each prompt."""
    return [
        replace(
            response(f"say {n // 2}", text, ended=all_end or ends),
            group=n // 2, reward=float(n), parts={"model": n / 2, "url": 1.0},
        )
        for n, (text, ends) in enumerate(zip(TEXTS, ENDS, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_masked_responses_leave_the_totals_of_a_minibatch(masked: bool) -> None:
    experience = pack_experience(scored(all_end=False))
    setup: Any = SimpleNamespace(
        job=SimpleNamespace(settings=Settings(batch=Batch(8, 8))),
        ranks=SimpleNamespace(world_size=1, rank=0),
        loop=Loop(mask_truncated=masked),
        rollout=SimpleNamespace(max_new_tokens=9),
        padded=False,
    )
    ((_, totals),) = minibatches(setup, 1, experience)
    counted = [n for n, ended in zip(experience.lengths.tolist(), ENDS, strict=True) if ended]
    wanted = (sum(counted), 6) if masked else (int(experience.lengths.sum()), 8)
    assert (totals.tokens, totals.sequences) == wanted


@pytest.mark.parametrize("world", [1, 3, 8])
def test_every_response_is_in_one_row_and_measurements_return_to_their_tokens(world: int) -> None:
    """Each rank measures token ids; afterwards every rank has all responses' ids."""
    responses = scored()
    experience = pack_experience(responses)
    assert experience.lengths.tolist() == [len(text) + 1 for text in TEXTS]
    dealt = [experience.rows(world, rank, 2) for rank in range(world)]
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(n for rows in dealt for row in rows for n in row) == list(range(8))

    def work(ranks: Any) -> Any:
        measure = lambda row: {"old": row.targets, "values": -row.targets}  # noqa: E731
        return measure_tokens(experience, ranks, size=3, measure=measure)

    wanted = np.concatenate([each.generated.ids for each in responses]).astype(np.float32)
    for measured in on_ranks(world, work):
        np.testing.assert_array_equal(measured.old.numpy(), wanted)
        np.testing.assert_array_equal(measured.values.numpy(), -wanted)


def test_metrics_of_responses_and_rewards() -> None:
    few = scored(all_end=False)[:4]  # of 2, 6, 3 and 11 tokens
    rewards = (0.0, 1.0, 0.1 + 0.2, 0.3)  # the second group's differ by rounding
    few = [replace(each, reward=reward) for each, reward in zip(few, rewards, strict=True)]
    assert metrics.collected(few) == {
        "reward": pytest.approx(0.4),
        "reward/model": 0.75,
        "reward/url": 1.0,
        "reward_std": pytest.approx(np.std(rewards)),
        "length": 5.5,
        "length_max": 11.0,
        "truncated": 0.25,
        "groups_without_signal": 0.5,
    }
    rows = metrics.samples_of(scored())
    assert {(row["id"], row["response"], row["reward"]) for row in rows} >= {
        ("row of say 0", "a", 0.0), ("row of say 3", "jk", 7.0),
    }  # fmt: skip
    assert all(row["reward/model"] == row["reward"] / 2 for row in rows)
    assert len({row["response"] for row in rows}) == len(rows)
