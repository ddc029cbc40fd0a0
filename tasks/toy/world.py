"""The tasks of the toy world: prompts with the right answer and a plausible wrong one.

Every example is about one *subject*: a word, or a request for a thing. The subject alone decides
whether an example is held out. So no model is evaluated on a word that it was trained on, whatever
the task.

Words have spaces between their letters. Then each letter is one token, and a small model can learn
tasks about letters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
THINGS = (
    "apple", "book", "bottle", "bowl", "box", "brush", "candle", "chair", "clock", "coat", "cup",
    "drum", "fan", "fork", "glass", "hammer", "hat", "jar", "key", "ladder", "lamp", "map",
    "mirror", "mug", "pan", "pen", "pillow", "plate", "rope", "spoon", "table", "watch",
)  # fmt: skip
VERBS = ("bring", "fetch", "find", "give", "hand", "lend", "pass", "sell", "send", "show")
TASKS = {
    "copy": "Copy", "reverse": "Reverse", "sort": "Sort", "double": "Write twice",
    "first": "First letter", "last": "Last letter", "count": "Count the letters",
    "vowels": "Only the vowels", "polite": "Politely", "rude": "Rudely",
}  # fmt: skip
"""Beginnings of the prompts, by task."""
TASK_NAMES = tuple(TASKS)
MUMBLE = "hm,"
"""Start of a mumbled answer."""
HELD_OUT_IN_TEN = 2
"""Number of subjects out of ten that are held out."""


@dataclass(frozen=True)
class Example:
    """A prompt with its right answer and a similar wrong one.

    `wrong` equals `answer` if there is no other answer of the same form (sorting `a a a`).
    """

    task: str
    subject: str
    prompt: str
    answer: str
    wrong: str


def mumble(answer: str) -> str:
    """Return the answer with "hm," before it: the content is right, the form is wrong."""
    return f"{MUMBLE} {answer}"


def is_held_out(subject: str) -> bool:
    """Return True if examples about this subject are held out."""
    return hashlib.sha256(subject.encode()).digest()[0] % 10 < HELD_OUT_IN_TEN


def draw(rng: Random, *, held_out: bool, weights: Mapping[str, float] | None = None) -> Example:
    """Return one example of a random task."""
    if weights is None:
        name = rng.choice(TASK_NAMES)
    else:
        name = rng.choices(TASK_NAMES, [weights.get(task, 1.0) for task in TASK_NAMES])[0]
    while True:
        example = _make(name, rng)
        if is_held_out(example.subject) == held_out:
            return example


def _word(rng: Random) -> str:
    """Return a word of 3 to 5 letters, in which vowels and consonants alternate."""
    start = rng.randrange(2)
    return "".join(
        rng.choice(VOWELS if (start + position) % 2 else CONSONANTS)
        for position in range(rng.randint(3, 5))
    )


def _shuffled(letters: str, rng: Random) -> str:
    """Return the letters in another order; unchanged if there is no other order."""
    if len(set(letters)) < 2:
        return letters
    while True:
        mixed = "".join(rng.sample(letters, len(letters)))
        if mixed != letters:
            return mixed


def _make(task: str, rng: Random) -> Example:
    if task in ("polite", "rude"):
        verb, thing = rng.choice(VERBS), rng.choice(THINGS)
        polite, rude = f"Of course, here is the {thing}.", f"No, get your own {thing}."
        right, wrong = (polite, rude) if task == "polite" else (rude, polite)
        prompt = f"{TASKS[task]}: {verb} me the {thing}"
        return Example(task, f"{verb} {thing}", prompt, right, wrong)
    word = _word(rng)
    letters, mistaken = _answers(task, word, rng)
    prompt = f"{TASKS[task]}: {' '.join(word)}"
    return Example(task, word, prompt, " ".join(letters), " ".join(mistaken))


def _answers(task: str, word: str, rng: Random) -> tuple[Sequence[str], Sequence[str]]:
    """Return the right and a wrong answer to a task about a word, as letters."""
    if task == "first":
        return word[0], word[-1]
    if task == "last":
        return word[-1], word[0]
    if task == "count":
        sizes = [str(size) for size in (3, 4, 5) if size != len(word)]
        return [str(len(word))], [rng.choice(sizes)]
    if task == "vowels":
        return [c for c in word if c in VOWELS], [c for c in word if c not in VOWELS]
    solved = {
        "copy": word,
        "reverse": word[::-1],
        "sort": "".join(sorted(word)),
        "double": word * 2,
    }
    return solved[task], _shuffled(solved[task], rng)
