"""Prompts and their order, sampling and scoring: the same on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.core.errors import DataError
from tasks.rl.collect import Collector
from tasks.rl.metrics import Clock, groups_without_signal
from tasks.rl.prompts import PromptOrder, load_prompts
from tasks.rl.responses import Prompt, Request, Response, ScoredResponse
from tasks.rl.rewards import Rewards, Weighted
from tests.rl.making import TOKENIZER, Judge, response
from tests.rl.peers import on_ranks
from tests.rl.playing import Player
from tests.training.conftest import make_tokenizer

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number: int, text: str, **more: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "messages": [{"role": "user", "content": text}], **more}


def load(
    path: Path, *, ranks: int = 1, limit: int = 60, tokenizer: Any = None
) -> list[tuple[Prompt, ...]]:
    tokenizer_ = tokenizer or make_tokenizer()
    return on_ranks(ranks, lambda r: load_prompts(path, tokenizer=tokenizer_, limit=limit, ranks=r))


def test_every_rank_gets_every_prompt(tmp_path: Path) -> None:
    path = written(tmp_path, *(row(n, "say " + "x" * n) for n in range(7)))
    (alone,) = load(path)
    assert [prompt.row["id"] for prompt in alone] == [f"r{n}" for n in range(7)]
    for several in load(path, ranks=3):
        assert len(several) == 7
        for mine, theirs in zip(alone, several, strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            assert mine.row == theirs.row
    tokenizer = make_tokenizer()
    text = "<|im_start|>user\nsay xxx<|im_end|>\n<|im_start|>assistant\n"
    assert alone[3].ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert alone[3].ids.dtype == np.int32


def test_every_rank_names_all_prompts_that_are_too_long(tmp_path: Path) -> None:
    path = written(tmp_path, *(row(n, "x" * (n * 10)) for n in range(6)))

    def refused(peer: Any) -> None:
        with pytest.raises(DataError) as caught:
            load_prompts(path, tokenizer=make_tokenizer(), limit=55, ranks=peer)
        # 19 tokens around what the user says
        details = [detail.partition(" tokens")[0] for detail in caught.value.details]
        assert details == ["r4: 59", "r5: 69"]
        assert "rollout.max_prompt_len=69" in caught.value.hint

    on_ranks(2, refused)


def test_prompts_that_cannot_be_rendered_are_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    strange = row(1, "x")
    strange["messages"] = [{"role": "system", "content": "be kind"}, *strange["messages"]]
    tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(DataError) as caught:
        load(written(tmp_path, row(0, "x"), strange), tokenizer=tokenizer)
    (detail,) = caught.value.details
    assert detail.startswith("r1: ")
    assert "no system message" in detail
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="template"):
        load(written(tmp_path, row(0, "x")), tokenizer=tokenizer)
    with pytest.raises(DataError, match="train.jsonl"):
        load(written(tmp_path))


def test_each_epoch_has_every_prompt_once_in_its_own_order() -> None:
    prompt_order = PromptOrder(total=7, per_iteration=3, refill_rounds=0, seed=5)
    stream = np.concatenate([prompt_order.numbers(3 * n, 3) for n in range(7)])
    epochs = stream.reshape(3, 7)
    for epoch in epochs:
        assert sorted(epoch) == list(range(7))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # An iteration may be larger than the dataset.
    numbers = PromptOrder(total=3, per_iteration=7, refill_rounds=0, seed=0).numbers(0, 7)
    assert sorted(numbers[:3]) == sorted(numbers[3:6]) == [0, 1, 2]


PROMPTS = [
    Prompt({"id": f"p{n}", "messages": [{"role": "user", "content": str(n)}]}, np.arange(1, n + 2))
    for n in range(12)
]


def letters(request: Request, number: int) -> str:
    """Return a response that is determined by the seed of the request."""
    place = request.seed + number
    return "abcdefgh"[place % 8] * (1 + place % 3)


def number_of(response: Response) -> int:
    return int(response.prompt.messages[0]["content"])


def collect(
    prompt_order: PromptOrder,
    rule: Callable[[Response], float],
    world: int = 1,
) -> list[tuple[list[Any], list[int]]]:
    """Return what every rank knows of iteration 1, and the prompts that it sampled itself."""

    def work(ranks: Any) -> tuple[list[Any], list[int]]:
        engine, rewards = Player(letters), Rewards([Weighted("function", 2.0, Judge(rule))])
        collector = Collector(engine, rewards, PROMPTS, TOKENIZER, ranks, 3)  # type: ignore[arg-type]
        known, position = collector.collect(1, prompt_order, 0, 4, Clock())
        sampled = [len(request.ids) - 1 for asked in engine.seen for request in asked]
        assert world > 1 or position == len(sampled), "every prompt taken is sampled"
        return known, sampled

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
        ids = scored.response.generated.ids
        assert scored.response.text == TOKENIZER.decode(ids, skip_special_tokens=True)
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


def test_rounding_is_no_signal() -> None:
    known = [
        ScoredResponse(response("say", "abc"), group, reward)
        for group, reward in ((0, 1.0), (0, 0.5), (1, 0.1 + 0.2), (1, 0.3))
    ]
    assert groups_without_signal(known) == [1]
