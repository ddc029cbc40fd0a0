"""The tasks of the toy world: what is asked, the right answer, and a plausible wrong one.

Every example is about one *subject* (a word, a thing somebody asks for). The subject alone decides
on which side of the train/held-out line an example falls, so that a model is never tested on a word
it was trained on, whatever the task.

Words are spelt with spaces between the letters: one letter is one token then, and a task about
letters is learnable by a small model.
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
"""How somebody begins who is not sure."""
HELD_OUT_IN_TEN = 2


@dataclass(frozen=True)
class Example:
    """One question with its right answer and a wrong one that resembles it.

    `wrong` equals `answer` where no other answer of the same shape exists (sorting `a a a`).
    """

    task: str
    subject: str
    prompt: str
    answer: str
    wrong: str


def mumble(answer: str) -> str:
    """The same answer as somebody gives it who is not sure: right, and not what was asked for."""
    return f"{MUMBLE} {answer}"


def is_held_out(subject: str) -> bool:
    """Whether examples about this subject belong to the held-out side. Depends on nothing else."""
    return hashlib.sha256(subject.encode()).digest()[0] % 10 < HELD_OUT_IN_TEN


def draw(rng: Random, *, held_out: bool, weights: Mapping[str, float] | None = None) -> Example:
    """One example of a random task, from one side of the line.

    Args:
        rng: draws.
        held_out: the side.
        weights: of tasks, 1 for those that are not named; None draws all alike.
    """
    if weights is None:
        name = rng.choice(TASK_NAMES)
    else:
        name = rng.choices(TASK_NAMES, [weights.get(one, 1.0) for one in TASK_NAMES])[0]
    make = TASKS[name]
    while True:
        example = make(rng)
        if is_held_out(example.subject) == held_out:
            return example


def _word(rng: Random) -> str:
    """A pronounceable word of 3 to 5 letters: vowels and consonants take turns."""
    start = rng.randrange(2)
    return "".join(
        rng.choice(VOWELS if (start + position) % 2 else CONSONANTS)
        for position in range(rng.randint(3, 5))
    )


def _shuffled(letters: str, rng: Random) -> str:
    """Another order of the same letters; the same where there is no other."""
    if len(set(letters)) < 2:
        return letters
    while True:
        mixed = "".join(rng.sample(letters, len(letters)))
        if mixed != letters:
            return mixed


def _other(value: int, low: int, high: int, rng: Random) -> int:
    """A number of [low, high] that is not `value`."""
    return rng.choice([n for n in range(low, high + 1) if n != value])


def _letters_task(name: str, ask: str, solve: Callable[[str], str]) -> Callable[[Random], Example]:
    def make(rng: Random) -> Example:
        word = _word(rng)
        answer = solve(word)
        wrong = _shuffled(answer, rng)
        prompt = f"{ask}: {' '.join(word)}"
        return Example(name, word, prompt, " ".join(answer), " ".join(wrong))

    return make


def _end_task(name: str, ask: str, position: int) -> Callable[[Random], Example]:
    """First or last letter; the wrong answer is the letter at the other end."""

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
    """The vowels of a word in their order; the wrong answer is its consonants."""
    word = _word(rng)
    vowels, consonants = ([c for c in word if (c in VOWELS) == kept] for kept in (True, False))
    prompt = f"Only the vowels: {' '.join(word)}"
    return Example("vowels", word, prompt, " ".join(vowels), " ".join(consonants))


def _reply(name: str, ask: str, *, polite: bool) -> Callable[[Random], Example]:
    """Answer a request in the manner asked for; the wrong answer has the other manner."""

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
