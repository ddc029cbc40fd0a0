"""Make wrong answers with the mistakes that a model makes.

A reward model needs to see many kinds of mistakes. If it has only seen letters in the wrong order,
it accepts a missing letter, and the policy exploits that.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tasks.toy.world import THINGS, Example, mumble

LETTERS = "abdefgiklmnoprstuvz"
MUMBLED = 5.0
"""Weight of a mumbled answer, the most frequent mistake of a policy; each other mistake has 1."""
_SPELT = ("copy", "reverse", "sort", "double", "vowels")


def spoil(example: Example, rng: Random) -> str:
    """Return a wrong answer to the prompt of an example."""
    ways: list[Callable[[Example, Random], str]] = [_mumbled, _plausible]
    if example.task in _SPELT:
        ways += [_without_one, _with_one_twice, _with_another, _of_another_task]
    elif example.task in ("first", "last"):
        ways += [_with_another]
    elif example.task in ("polite", "rude"):
        ways += [_another_thing, _cut_short]
    weights = [MUMBLED if way is _mumbled else 1.0 for way in ways]
    while True:
        answer = rng.choices(ways, weights)[0](example, rng)
        if answer and answer != example.answer:
            return answer


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
    """Return the right answer to another task about the same word."""
    word = list(example.subject)
    answers = (word, word[::-1], sorted(word), word * 2)
    return " ".join(rng.choice(answers))


def _another_thing(example: Example, rng: Random) -> str:
    thing = example.answer.rstrip(".").split()[-1]
    return example.answer.replace(thing, rng.choice(THINGS))


def _cut_short(example: Example, rng: Random) -> str:
    words = example.answer.split()
    return " ".join(words[: rng.randrange(1, len(words))])
