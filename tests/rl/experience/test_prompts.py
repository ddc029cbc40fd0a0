"""Prompts of a dataset: rendered and refused equally on all ranks, and their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.core.errors import DataError
from tasks.rl.experience.prompts import PromptOrder, load_prompts, request_seed
from tasks.rl.experience.responses import Prompt
from tasks.rl.loop import iterations
from tests.rl.peers import on_ranks
from tests.settings import Batch, Loop
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


def test_the_reference_answer_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    bare, answered = row(0, "say x"), row(1, "say x", answer="x", columns={"id": "mine", "n": 3})
    answered["messages"] = [*answered["messages"], {"role": "assistant", "content": "x"}]
    ((without, with_answer),) = load(written(tmp_path, bare, answered))
    np.testing.assert_array_equal(without.ids, with_answer.ids)
    assert with_answer.messages == bare["messages"]
    assert with_answer.row["answer"] == "x"
    assert with_answer.row["n"] == 3
    assert with_answer.row["id"] == "r1", "a column of the user's does not hide what is ours"
    assert "answer" not in without.row


def test_every_rank_names_all_prompts_that_are_too_long(tmp_path: Path) -> None:
    path = written(tmp_path, *(row(n, "x" * (n * 10)) for n in range(6)))
    seen: list[DataError] = []

    def refused(peer: Any) -> None:
        with pytest.raises(DataError) as caught:
            load_prompts(path, tokenizer=make_tokenizer(), limit=55, ranks=peer)
        seen.append(caught.value)

    on_ranks(2, refused)
    assert len(seen) == 2
    for error in seen:
        # 19 tokens around what the user says
        assert [d.partition(" tokens")[0] for d in error.details] == ["r4: 59", "r5: 69"]
        assert "2 of 6" in error.message
        assert "rollout.max_prompt_len=69" in error.hint


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
    other_seed = PromptOrder(total=7, per_iteration=3, refill_rounds=0, seed=6)
    assert other_seed.numbers(0, 3) != prompt_order.numbers(0, 3)
    assert prompt_order.numbers(9, 3) == PromptOrder(7, 3, 0, 5).numbers(9, 3)
    # An iteration may be larger than the dataset.
    numbers = PromptOrder(total=3, per_iteration=7, refill_rounds=0, seed=0).numbers(0, 7)
    assert sorted(numbers[:3]) == sorted(numbers[3:6]) == [0, 1, 2]


def test_an_epoch_has_as_many_iterations_with_and_without_refill() -> None:
    for refill in (0, 2):
        loop = Loop(rollout_batch_size=32, refill=refill)
        assert iterations(loop, Batch(epochs=1.0), prompts=1000) == 32


def test_request_seeds_depend_on_each_of_their_parts() -> None:
    usual = (1, 2, 3)
    seeds = {request_seed(*usual), request_seed(0, 2, 3), request_seed(1, 0, 3)}
    seeds |= {request_seed(1, 2, 0), request_seed(3, 2, 1)}
    assert len(seeds) == 5
    assert request_seed(*usual) == request_seed(*usual)
    assert all(0 <= seed < 2**31 for seed in seeds)
