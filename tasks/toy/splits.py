"""Corpus and data sets of the toy world, each fixed by its seed.

All of them are lists of plain dictionaries or `Example`s; nothing here knows files or models.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tasks.toy.world import Example, draw

CLEAN_PART = 0.7
"""Part of the pre-training corpus, from its start, that has right answers only."""
WRONG_SHARE = 0.5
"""Share of wrong answers in the rest: the base has room to improve."""

LARGEST_SPLIT = 20_000
"""Far fewer than the different prompts that either side has (over 100,000)."""

Message = dict[str, str]


def corpus(size: int, *, seed: int) -> list[tuple[str, str]]:
    """What the base model is pre-trained on, in order: (prompt, answer).

    Right answers first, so that a small model learns the tasks at all within seconds; then a
    stretch in which half of the answers are wrong, so that it unlearns to give them. Only
    subjects of the training side occur.
    """
    rng = Random(f"corpus {seed}")
    pairs = []
    for position in range(size):
        example = draw(rng, held_out=False)
        mislead = position >= CLEAN_PART * size and rng.random() < WRONG_SHARE
        pairs.append((example.prompt, example.wrong if mislead else example.answer))
    return pairs


def examples(size: int, *, seed: int, held_out: bool) -> list[Example]:
    """`size` examples with different prompts, from one side of the line.

    Raises:
        ValueError: more than `LARGEST_SPLIT`.
    """
    if size > LARGEST_SPLIT:
        raise ValueError(f"{size} examples asked of the toy world, at most {LARGEST_SPLIT} a split")
    rng = Random(f"{'heldout' if held_out else 'train'} {seed}")
    found: dict[str, Example] = {}
    while len(found) < size:
        example = draw(rng, held_out=held_out)
        found.setdefault(example.prompt, example)
    return list(found.values())


def conversation(example: Example, *, row_id: str) -> dict[str, Any]:
    """An SFT row: the question and its right answer."""
    messages = [*_question(example), {"role": "assistant", "content": example.answer}]
    return {"id": row_id, "task": example.task, "messages": messages}


def preference(example: Example, *, row_id: str) -> dict[str, Any]:
    """A preference row: right answer chosen, wrong one rejected."""
    return {
        "id": row_id,
        "task": example.task,
        "prompt": _question(example),
        "chosen": example.answer,
        "rejected": example.wrong,
    }


def prompt(example: Example, *, row_id: str) -> dict[str, Any]:
    """A prompt with its checkable answer, for reinforcement learning."""
    return {
        "id": row_id,
        "task": example.task,
        "messages": _question(example),
        "answer": example.answer,
    }


def _question(example: Example) -> list[Message]:
    return [{"role": "user", "content": example.prompt}]
