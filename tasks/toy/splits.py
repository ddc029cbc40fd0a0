"""Pre-training corpus and dataset rows of the toy world, each fixed by a seed."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

from tasks.toy.spoil import spoil
from tasks.toy.world import Example, draw, mumble

CLEAN_PART = 0.78
"""Share of the pre-training corpus, from its start, in which all answers are clean."""
MUMBLED_SHARE = 0.8
"""Share of mumbled answers in the rest, so that the base has room to improve."""

EFFORT = {
    "reverse": 2.0, "sort": 2.5, "double": 2.5, "copy": 1.5, "vowels": 1.0, "first": 0.6,
    "last": 0.6, "count": 0.4, "polite": 0.6, "rude": 0.6,
}  # fmt: skip
"""Weights of the tasks in pre-training; in datasets all tasks are equally frequent."""

LARGEST_SPLIT = 20_000
"""Maximum size of a split; each side has over 100,000 different prompts."""

Message = dict[str, str]
Payload = dict[str, Any]


def corpus(size: int, *, seed: int) -> list[tuple[str, str]]:
    """Return the pre-training corpus in order, as pairs (prompt, answer).

    The first part has clean answers, so that a small model learns the tasks within seconds. In the
    last part most answers are mumbled; training has to remove this habit. All subjects are of the
    training side.

    Args:
        size: number of pairs.
        seed: seed of the corpus.
    """
    rng = Random(f"corpus {seed}")
    pairs = []
    for position in range(size):
        example = draw(rng, held_out=False, weights=EFFORT)
        mislead = position >= CLEAN_PART * size and rng.random() < MUMBLED_SHARE
        pairs.append((example.prompt, mumble(example.answer) if mislead else example.answer))
    return pairs


def examples(size: int, *, seed: int, held_out: bool, wrong_too: bool = False) -> list[Example]:
    """Return `size` examples with different prompts.

    Args:
        size: number of examples.
        seed: seed of the examples.
        held_out: True for held-out examples, False for training examples.
        wrong_too: only examples whose wrong answer differs from the right one (`sort a a` has
            no wrong answer).

    Raises:
        ValueError: `size` exceeds `LARGEST_SPLIT`.
    """
    if size > LARGEST_SPLIT:
        raise ValueError(
            f"{size} examples asked for, the toy world has at most {LARGEST_SPLIT} a split"
        )
    rng = Random(f"{'heldout' if held_out else 'train'} {seed}")
    chosen: dict[str, Example] = {}
    while len(chosen) < size:
        example = draw(rng, held_out=held_out)
        if not wrong_too or example.wrong != example.answer:
            chosen.setdefault(example.prompt, example)
    return list(chosen.values())


def conversation(example: Example) -> Payload:
    """Return a conversation: the prompt and its right answer."""
    return {"task": example.task, "messages": [*_question(example), _answer(example.answer)]}


def pair(example: Example) -> Payload:
    """Return a preference pair; a hash of the prompt selects the wrong answer."""
    wrong = spoil(example, Random(f"spoil {example.prompt}"))
    return {
        "task": example.task,
        "prompt": _question(example),
        "chosen": [_answer(example.answer)],
        "rejected": [_answer(wrong)],
    }


def labelled(example: Example) -> Payload:
    """Return the right or the wrong answer with its label; a hash of the prompt decides."""
    good = hashlib.sha256(example.prompt.encode()).digest()[0] % 2 == 0
    answer = example.answer if good else example.wrong
    messages = [*_question(example), _answer(answer)]
    return {"task": example.task, "messages": messages, "desirable": good}


def asked(example: Example) -> Payload:
    """Return a prompt for online training, with the right answer for the reward."""
    messages = [*_question(example), _answer(example.answer)]
    return {"task": example.task, "messages": messages, "answer": example.answer, "columns": {}}


def prompt(example: Example) -> Payload:
    """Return a prompt and, apart from its messages, the right answer."""
    return {"task": example.task, "messages": _question(example), "answer": example.answer}


def _question(example: Example) -> list[Message]:
    return [{"role": "user", "content": example.prompt}]


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
