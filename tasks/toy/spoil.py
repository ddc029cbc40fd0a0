"""Answers that are wrong in the ways in which a model's answers are wrong.

A reward model that has only seen letters in another order does not mind one that is missing, and a
policy that learns from it finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tasks.toy.world import THINGS, Example, mumble

LETTERS = "abdefgiklmnoprstuvz"
MUMBLED = 5.0
"""How often the answer is mumbled, where every other way is 1: what a policy gets wrong is mostly
that."""
_SPELT = ("copy", "reverse", "sort", "double", "vowels")


def spoil(example: Example, rng: Random) -> str:
    """An answer to the example's question that is not the right one."""
    ways: list[Callable[[Example, Random], str]] = [_mumbled, _plausible]
    if example.task in _SPELT:
        ways += [_without_one, _with_one_twice, _with_another, _of_another_task]
    elif example.task in ("first", "last"):
        ways += [_with_another]
    elif example.task in ("polite", "rude"):
        ways += [_another_thing, _cut_short]
    weights = [MUMBLED if way is _mumbled else 1.0 for way in ways]
    while True:
        found = rng.choices(ways, weights)[0](example, rng)
        if found and found != example.answer:
            return found


def _mumbled(example: Example, rng: Random) -> str:
    return mumble(example.answer)


def _plausible(example: Example, rng: Random) -> str:
    return example.wrong if example.wrong != example.answer else _with_another(example, rng)


def _without_one(example: Example, rng: Random) -> str:
    letters = example.answer.split()
    letters.pop(rng.randrange(len(letters)))
    return " ".join(letters)


def _with_one_twice(example: Example, rng: Random) -> str:
    letters = example.answer.split()
    at = rng.randrange(len(letters))
    return " ".join([*letters[: at + 1], *letters[at:]])


def _with_another(example: Example, rng: Random) -> str:
    letters = example.answer.split()
    letters[rng.randrange(len(letters))] = rng.choice(LETTERS)
    return " ".join(letters)


def _of_another_task(example: Example, rng: Random) -> str:
    """What would be right, had the question been another one about the same word."""
    word = list(example.subject)
    answers = (word, word[::-1], sorted(word), word * 2)
    return " ".join(rng.choice(answers))


def _another_thing(example: Example, rng: Random) -> str:
    thing = example.answer.rstrip(".").split()[-1]
    return example.answer.replace(thing, rng.choice(THINGS))


def _cut_short(example: Example, rng: Random) -> str:
    words = example.answer.split()
    return " ".join(words[: rng.randrange(1, len(words))])
