"""The tasks of the toy world: prompts with the right answer and a plausible wrong one.

Every example is about one *subject*: a word, or a request for a thing. The subject alone decides
whether an example is held out. So no model is evaluated on a word that it was trained on, whatever
the task.

Words have spaces between their letters. Then each letter is one token, and a small model can learn
tasks about letters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
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
    make = TASKS[name]
    while True:
        example = make(rng)
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


def _other(value: int, low: int, high: int, rng: Random) -> int:
    """Return a number in [low, high] that is not `value`."""
    return rng.choice([n for n in range(low, high + 1) if n != value])


def _letters_task(name: str, ask: str, solve: Callable[[str], str]) -> Callable[[Random], Example]:
    """Make a task about all letters of a word; the wrong answer has them in another order."""

    def make(rng: Random) -> Example:
        word = _word(rng)
        answer = solve(word)
        wrong = _shuffled(answer, rng)
        prompt = f"{ask}: {' '.join(word)}"
        return Example(name, word, prompt, " ".join(answer), " ".join(wrong))

    return make


def _end_task(name: str, ask: str, position: int) -> Callable[[Random], Example]:
    """Make a task about the first or last letter; the wrong answer is the other of the two."""

    def make(rng: Random) -> Example:
        word = _word(rng)
        right, wrong = word[position], word[-1 - position]
        return Example(name, word, f"{ask}: {' '.join(word)}", right, wrong)

    return make


def _count(rng: Random) -> Example:
    word = _word(rng)
    right, wrong = len(word), _other(len(word), 3, 5, rng)
    prompt = f"Count the letters: {' '.join(word)}"
    return Example("count", word, prompt, str(right), str(wrong))


def _vowels(rng: Random) -> Example:
    """Return a task about the vowels of a word; the wrong answer is its consonants."""
    word = _word(rng)
    vowels, consonants = ([c for c in word if (c in VOWELS) == kept] for kept in (True, False))
    prompt = f"Only the vowels: {' '.join(word)}"
    return Example("vowels", word, prompt, " ".join(vowels), " ".join(consonants))


def _reply(name: str, ask: str, *, polite: bool) -> Callable[[Random], Example]:
    """Make a task to answer a request politely or rudely; the wrong answer does the opposite."""

    def make(rng: Random) -> Example:
        verb, thing = rng.choice(VERBS), rng.choice(THINGS)
        friendly, rude = f"Of course, here is the {thing}.", f"No, get your own {thing}."
        right, wrong = (friendly, rude) if polite else (rude, friendly)
        prompt = f"{ask}: {verb} me the {thing}"
        return Example(name, f"{verb} {thing}", prompt, right, wrong)

    return make


TASKS: dict[str, Callable[[Random], Example]] = {
    "copy": _letters_task("copy", "Copy", str),
    "reverse": _letters_task("reverse", "Reverse", lambda word: word[::-1]),
    "sort": _letters_task("sort", "Sort", lambda word: "".join(sorted(word))),
    "double": _letters_task("double", "Write twice", lambda word: word * 2),
    "first": _end_task("first", "First letter", 0),
    "last": _end_task("last", "Last letter", -1),
    "count": _count,
    "vowels": _vowels,
    "polite": _reply("polite", "Politely", polite=True),
    "rude": _reply("rude", "Rudely", polite=False),
}
TASK_NAMES = tuple(TASKS)
