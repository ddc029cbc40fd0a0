"""The tasks of the toy world, its pre-training corpus and dataset rows, each fixed by a seed.

Every example is about a *subject*: a word, or a request for a thing. The subject alone decides
whether an example is held out, so no model is evaluated on a word that it was trained on, whatever
the task. Words have spaces between their letters: each letter is a token, and a small model can
learn tasks about letters.

Wrong answers have the mistakes that a model makes (`spoil`). A reward model needs to see many kinds
of them: if it has only seen letters in the wrong order, it accepts a missing letter, and the policy
exploits that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tasks.toy import calculator

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
_MISTAKES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("copy", "reverse", "sort", "double", "vowels"),
        ("letter missing", "letter twice", "other letter", "other task"),
    ),
    **dict.fromkeys(("first", "last"), ("other letter",)),
    **dict.fromkeys(("polite", "rude"), ("other thing", "cut short")),
}
EFFORT = {
    "reverse": 2.0, "sort": 2.5, "double": 2.5, "copy": 1.5, "vowels": 1.0, "first": 0.6,
    "last": 0.6, "count": 0.4, "polite": 0.6, "rude": 0.6,
}  # fmt: skip
"""Weights of the tasks in pre-training; in datasets all tasks are equally frequent."""
HELD_OUT_IN_TEN = 2
"""Number of subjects out of ten that are held out."""
CLEAN_PART = 0.78
"""Share of the pre-training corpus, from its start, in which all answers are clean."""
MUMBLED_SHARE = 0.8
"""Share of mumbled answers in the rest, so that the base has room to improve."""
LARGEST_SPLIT = 20_000
"""Maximum size of a split; each side has over 100,000 different prompts."""
MUMBLE = "hm, "
"""Beginning of a mumbled answer: its content is right, its form is wrong."""
MUMBLED = 5.0
"""Weight of a mumbled answer, the most frequent mistake of a policy; each other mistake has 1."""

Payload = dict[str, Any]


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


def is_held_out(subject: str) -> bool:
    """Return True if examples about this subject are held out."""
    return _first_byte(subject) % 10 < HELD_OUT_IN_TEN


def _first_byte(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0]


def draw(rng: Random, *, held_out: bool, weights: Mapping[str, float] | None = None) -> Example:
    """Return an example of a random task."""
    if weights is None:
        name = rng.choice(TASK_NAMES)
    else:
        (name,) = rng.choices(TASK_NAMES, [weights[task] for task in TASK_NAMES])
    while True:
        example = _make(name, rng)
        if is_held_out(example.subject) == held_out:
            return example


def _make(task: str, rng: Random) -> Example:
    if task in ("polite", "rude"):
        verb, thing = rng.choice(VERBS), rng.choice(THINGS)
        polite, rude = f"Of course, here is the {thing}.", f"No, get your own {thing}."
        right, wrong = (polite, rude) if task == "polite" else (rude, polite)
        prompt = f"{TASKS[task]}: {verb} me the {thing}"
        return Example(task, f"{verb} {thing}", prompt, right, wrong)
    start = rng.randrange(2)  # vowels and consonants alternate
    word = "".join(
        rng.choice(VOWELS if (start + position) % 2 else CONSONANTS)
        for position in range(rng.randint(3, 5))
    )
    letters, mistaken = _answers(task, word, rng)
    prompt = f"{TASKS[task]}: {' '.join(word)}"
    return Example(task, word, prompt, " ".join(letters), " ".join(mistaken))


def _answers(task: str, word: str, rng: Random) -> tuple[Sequence[str], Sequence[str]]:
    """Return the right and a wrong answer to a task about a word, as letters."""
    if task == "count":
        sizes = [str(size) for size in (3, 4, 5) if size != len(word)]
        return [str(len(word))], [rng.choice(sizes)]
    if task == "vowels":
        return [c for c in word if c in VOWELS], [c for c in word if c not in VOWELS]
    if task in ("first", "last"):
        return (word[0], word[-1]) if task == "first" else (word[-1], word[0])
    solved = {
        "copy": word,
        "reverse": word[::-1],
        "sort": "".join(sorted(word)),
        "double": word * 2,
    }
    letters = mixed = solved[task]
    while mixed == letters and len(set(letters)) > 1:
        mixed = "".join(rng.sample(letters, len(letters)))
    return letters, mixed


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
        pairs.append((example.prompt, MUMBLE * mislead + example.answer))
    return pairs


def examples(size: int, *, seed: int, held_out: bool, wrong_too: bool = False) -> list[Example]:
    """Return `size` examples with different prompts; ValueError if there are not so many.

    `wrong_too`: only examples whose wrong answer differs from the right one.
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


def conversation(example: Example, answer: str = "") -> Payload:
    """Return a conversation: the prompt and an answer, by default the right one."""
    question = {"role": "user", "content": example.prompt}
    response = {"role": "assistant", "content": answer or example.answer}
    return {"task": example.task, "messages": [question, response]}


def pair(example: Example) -> Payload:
    """Return a preference pair; a hash of the prompt selects the wrong answer."""
    wrong = spoil(example, Random(f"spoil {example.prompt}"))
    question, chosen = conversation(example)["messages"]
    rejected = conversation(example, wrong)["messages"][1:]
    return {
        "task": example.task, "prompt": [question], "chosen": [chosen], "rejected": rejected,
    }  # fmt: skip


def labelled(example: Example) -> Payload:
    """Return the right or the wrong answer with its label; a hash of the prompt decides."""
    good = _first_byte(example.prompt) % 2 == 0
    return {**conversation(example, "" if good else example.wrong), "desirable": good}


def asked(example: Example) -> Payload:
    """Return a prompt for online training, with the right answer for the reward."""
    return {**conversation(example), "answer": example.answer, "columns": {}}


def spoil(example: Example, rng: Random) -> str:
    """Return a wrong answer to the prompt of an example."""
    mistakes = ["mumbled", "plausible", *_MISTAKES.get(example.task, ())]
    weights = [MUMBLED if mistake == "mumbled" else 1.0 for mistake in mistakes]
    while True:
        answer = _with(rng.choices(mistakes, weights)[0], example, rng)
        if answer and answer != example.answer:
            return answer


def _with(mistake: str, example: Example, rng: Random) -> str:
    """Return the answer with a mistake; it may be empty or right by chance."""
    words = example.answer.split()
    if mistake == "mumbled":
        return MUMBLE + example.answer
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
        words[rng.randrange(len(words))] = rng.choice("abdefgiklmnoprstuvz")
    return " ".join(words)


ROWS: Mapping[str, Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "letters": {
        "conversations": conversation, "pairs": pair, "labelled": labelled, "prompts": asked,
    },
    "calculator": {
        "conversations": calculator.demonstration, "prompts": calculator.question,
    },
}  # fmt: skip
"""Kinds of rows by task, and the functions that make one."""


def write_dataset(
    out: Path,
    sizes: Mapping[str, int],
    *,
    seed: int,
    rows: str = "conversations",
    tasks: str = "letters",
) -> None:
    """Write train.jsonl and heldout.jsonl into `out`; `sizes` are numbers of rows by split.

    ValueError if a split is larger than the toy world allows.
    """
    for split, size in sizes.items():
        how: dict[str, Any] = {"seed": seed, "held_out": split == "heldout"}
        if tasks == "calculator":
            chosen: list[Any] = calculator.sums(size, **how)
        else:
            chosen = examples(size, **how, wrong_too=rows in ("pairs", "labelled"))
        with (out / f"{split}.jsonl").open("w", encoding="ascii", newline="\n") as file:
            for number, payload in enumerate(map(ROWS[tasks][rows], chosen)):
                if split == "heldout" and "chosen" in payload:  # for evaluation
                    payload = {"messages": [*payload["prompt"], *payload["chosen"]], **payload}
                file.write(json.dumps({"id": f"{split}-{number:05}", **payload}) + "\n")
