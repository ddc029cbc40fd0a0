"""Pre-training corpus and dataset rows of the toy world, each fixed by a seed.

Wrong answers have the mistakes that a model makes (`spoil`). A reward model needs to see many kinds
of them: if it has only seen letters in the wrong order, it accepts a missing letter, and the policy
exploits that.
"""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

from tasks.toy.world import THINGS, Example, draw, mumble

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

LETTERS = "abdefgiklmnoprstuvz"
MUMBLED = 5.0
"""Weight of a mumbled answer, the most frequent mistake of a policy; each other mistake has 1."""
_SPELT = ("copy", "reverse", "sort", "double", "vowels")

Message = dict[str, str]
Payload = dict[str, Any]


def corpus(size: int, *, seed: int) -> list[tuple[str, str]]:
    """Return the pre-training corpus in order, as pairs (prompt, answer).

    The first part has clean answers, so that a small model learns the tasks within seconds. In the
    last part most answers are mumbled; training has to remove this habit. All subjects are of the
    training side.
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

    `wrong_too`: only examples whose wrong answer differs from the right one.

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


def _question(example: Example) -> list[Message]:
    return [{"role": "user", "content": example.prompt}]


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def spoil(example: Example, rng: Random) -> str:
    """Return a wrong answer to the prompt of an example."""
    mistakes = ["mumbled", "plausible"]
    if example.task in _SPELT:
        mistakes += ["letter missing", "letter twice", "other letter", "other task"]
    elif example.task in ("first", "last"):
        mistakes += ["other letter"]
    elif example.task in ("polite", "rude"):
        mistakes += ["other thing", "cut short"]
    weights = [MUMBLED if mistake == "mumbled" else 1.0 for mistake in mistakes]
    while True:
        answer = _with(rng.choices(mistakes, weights)[0], example, rng)
        if answer and answer != example.answer:
            return answer


def _with(mistake: str, example: Example, rng: Random) -> str:
    """Return the answer with a mistake; it may be empty or right by chance."""
    words = example.answer.split()
    if mistake == "mumbled":
        return mumble(example.answer)
    if mistake == "plausible" and example.wrong != example.answer:
        return example.wrong
    if mistake == "letter missing":
        words.pop(rng.randrange(len(words)))
    elif mistake == "letter twice":
        at = rng.randrange(len(words))
        words.insert(at, words[at])
    elif mistake == "other task":  # about the same word
        word = list(example.subject)
        words = list(rng.choice((word, word[::-1], sorted(word), word * 2)))
    elif mistake == "other thing":
        thing = example.answer.rstrip(".").split()[-1]
        return example.answer.replace(thing, rng.choice(THINGS))
    elif mistake == "cut short":
        words = words[: rng.randrange(1, len(words))]
    else:
        words[rng.randrange(len(words))] = rng.choice(LETTERS)
    return " ".join(words)
