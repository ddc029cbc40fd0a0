"""Corpus and data sets of the toy world, each fixed by its seed.

All of them are lists of plain dictionaries or `Example`s; nothing here knows files or models.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

from tasks.toy.spoil import spoil
from tasks.toy.world import Example, draw, mumble

CLEAN_PART = 0.78
"""Part of the pre-training corpus, from its start, whose answers are as they should be."""
MUMBLED_SHARE = 0.8
"""Share of the rest's answers that are mumbled: the base has room to improve."""

EFFORT = {
    "reverse": 2.0, "sort": 2.5, "double": 2.5, "copy": 1.5, "vowels": 1.0, "first": 0.6,
    "last": 0.6, "count": 0.4, "polite": 0.6, "rude": 0.6,
}  # fmt: skip
"""How often a task occurs in pre-training; in data sets all are alike."""

LARGEST_SPLIT = 20_000
"""Far fewer than the different prompts that either side has (over 100,000)."""

Message = dict[str, str]
Payload = dict[str, Any]


def corpus(size: int, *, seed: int) -> list[tuple[str, str]]:
    """What the base model is pre-trained on, in order: (prompt, answer).

    Right answers first, so that a small model learns the tasks at all within seconds; then a
    stretch in which most answers are mumbled, a habit that it has to be cured of. Only subjects of
    the training side occur.
    """
    rng = Random(f"corpus {seed}")
    pairs = []
    for position in range(size):
        example = draw(rng, held_out=False, weights=EFFORT)
        mislead = position >= CLEAN_PART * size and rng.random() < MUMBLED_SHARE
        pairs.append((example.prompt, mumble(example.answer) if mislead else example.answer))
    return pairs


def examples(size: int, *, seed: int, held_out: bool, wrong_too: bool = False) -> list[Example]:
    """`size` examples with different prompts, from one side of the line.

    Args:
        size: how many.
        seed: which.
        held_out: the side.
        wrong_too: only examples whose wrong answer differs from the right one (`sort a a` has
            but one).

    Raises:
        ValueError: more than `LARGEST_SPLIT`.
    """
    if size > LARGEST_SPLIT:
        raise ValueError(f"{size} examples asked of the toy world, at most {LARGEST_SPLIT} a split")
    rng = Random(f"{'heldout' if held_out else 'train'} {seed}")
    found: dict[str, Example] = {}
    while len(found) < size:
        example = draw(rng, held_out=held_out)
        if not wrong_too or example.wrong != example.answer:
            found.setdefault(example.prompt, example)
    return list(found.values())


def conversation(example: Example) -> Payload:
    """The question and its right answer."""
    return {"task": example.task, "messages": [*_question(example), _answer(example.answer)]}


def pair(example: Example) -> Payload:
    """Right answer chosen, a wrong one rejected; which, the question decides."""
    wrong = spoil(example, Random(f"spoil {example.prompt}"))
    return {
        "task": example.task,
        "prompt": _question(example),
        "chosen": [_answer(example.answer)],
        "rejected": [_answer(wrong)],
    }


def labelled(example: Example) -> Payload:
    """The right or the wrong answer, by a hash of the question, and which of the two it is."""
    good = hashlib.sha256(example.prompt.encode()).digest()[0] % 2 == 0
    answer = example.answer if good else example.wrong
    messages = [*_question(example), _answer(answer)]
    return {"task": example.task, "messages": messages, "desirable": good}


def asked(example: Example) -> Payload:
    """The question, to be answered; with the right answer, which a reward may compare with."""
    messages = [*_question(example), _answer(example.answer)]
    return {"task": example.task, "messages": messages, "answer": example.answer, "columns": {}}


def prompt(example: Example) -> Payload:
    """A prompt with its checkable answer, for reinforcement learning."""
    return {
        "task": example.task,
        "messages": _question(example),
        "answer": example.answer,
    }


def _question(example: Example) -> list[Message]:
    return [{"role": "user", "content": example.prompt}]


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
