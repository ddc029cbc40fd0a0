"""Rows of a dataset, read by number, and drafts of examples made from them.

A draft has one conversation per role, and the row's numbers:

rows           roles              loss on
conversations  text               the last answer, every answer, or every token
texts          text               every token, as in pre-training
pairs          chosen, rejected   the answers after the prompt
labelled       text, mismatched   the last answer; `mismatched` is the prompt with the answer
                                  of another example (Ethayarajh et al. 2024, sec. 4.1)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tasks.core.errors import ConfigError, DataError
from tasks.training.tokens.chat import Document, Message, Turns

CONVERSATIONS, PAIRS, LABELLED = ("text",), ("chosen", "rejected"), ("text", "mismatched")
LAST_ANSWER, EVERY_TOKEN = "last_answer", "every_token"
PARTNERS = 64
"""Examples searched for a `mismatched` answer."""
_KINDS = {CONVERSATIONS: "conversations", PAIRS: "pairs", LABELLED: "labelled"}


class RowFile:
    """A JSON Lines file whose rows are read on demand. Raises DataError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        self._ends = np.cumsum([len(line) for line in self._file])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ends)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return row `number`, counted from 0.

        Raises:
            DataError: the line is not a JSON object with an id; names file and line.
        """
        self._file.seek(int(self._ends[number - 1]) if number else 0)
        try:
            row = json.loads(self._file.readline())
        except ValueError as error:
            raise DataError(f"{self.path}:{number + 1}: not JSON: {error}") from error
        if not isinstance(row, dict) or "id" not in row:
            raise DataError(f"{self.path}:{number + 1}: not a row of a dataset: no id")
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Draft(NamedTuple):
    """An example before tokenisation, or the `problem` that makes its row unusable.

    `without_loss` counts the answers of a conversation that bear no loss.
    """

    name: str
    conversations: tuple[Turns, ...] | tuple[Document]
    values: dict[str, float]
    problem: str = ""
    without_loss: int = 0


def holds_texts(path: Path) -> bool:
    """Return True if the first row of a split is a raw text."""
    with path.open() as file:
        first = file.readline()
    return bool(first) and "text" in json.loads(first)


class Drafts(RowFile):
    """The drafts of a split, by number.

    Raises:
        ConfigError: the rows are not of the kind that the roles need.
        DataError: the split is empty or cannot be read.
    """

    def __init__(self, path: Path, *, roles: tuple[str, ...], mask: str, seed: int) -> None:
        super().__init__(path)
        self._roles, self._mask = roles, mask
        if not len(self):
            raise DataError(f"{path}: no samples", hint="data.path=... or data.eval_fraction=...")
        first = self[0]
        self.texts = "text" in first
        kind = PAIRS if "chosen" in first else LABELLED if "desirable" in first else CONVERSATIONS
        if kind != roles:
            raise ConfigError(
                f"{path} holds {_KINDS[kind]}, the objective needs {_KINDS[roles]}",
                hint="make the dataset for this objective: prepare_data with train.objective=...",
            )
        if self.texts and mask != EVERY_TOKEN:
            raise ConfigError(
                f"train.mask={mask}, and {path} holds raw texts, which have no answers",
                hint=f"train.mask={EVERY_TOKEN}",
            )
        if roles == LABELLED:
            self._order = np.random.default_rng(seed).permutation(len(self))
            self._place = np.argsort(self._order)

    def draft(self, number: int) -> Draft:
        """Return draft `number`, counted from 0."""
        row = self[number]
        name = str(row["id"])
        try:
            if self._roles == PAIRS:
                return self._pair(name, row)
            if self._roles == LABELLED:
                return self._labelled(name, row, number)
            return self._conversation(name, row)
        except (KeyError, TypeError, IndexError) as error:
            return Draft(name, (), {}, f"not a row of {_KINDS[self._roles]}: {error!r}")

    def _conversation(self, name: str, row: dict[str, Any]) -> Draft:
        if self.texts:
            return Draft(name, (Document(row["text"]),), {})
        messages = row["messages"]
        first = len(messages) - 1 if self._mask == LAST_ANSWER else 0
        turns = Turns(messages, first, self._mask == EVERY_TOKEN, row.get("tools"))
        earlier = sum(message["role"] == "assistant" for message in messages[:first])
        return Draft(name, (turns,), {}, without_loss=earlier)

    def _pair(self, name: str, row: dict[str, Any]) -> Draft:
        prompt = row["prompt"]
        whole = ([*prompt, *row[role]] for role in PAIRS)
        both = tuple(Turns(each, len(prompt), tools=row.get("tools")) for each in whole)
        values = {"margin": float(row["margin"])} if "margin" in row else {}
        return Draft(name, both, values)

    def _labelled(self, name: str, row: dict[str, Any], number: int) -> Draft:
        *prompt, answer = row["messages"]
        mismatched = self._partner(number, prompt, answer)
        if mismatched is None:
            searched = min(PARTNERS, len(self) - 1)
            return Draft(name, (), {}, f"none of {searched} other examples has another prompt and "
                         "another answer, which kto compares with")  # fmt: skip
        whole = (row["messages"], [*prompt, mismatched])
        both = tuple(Turns(each, len(prompt), tools=row.get("tools")) for each in whole)
        return Draft(name, both, {"desirable": float(bool(row["desirable"]))})

    def _partner(self, number: int, prompt: list[Message], answer: Message) -> Message | None:
        """Return the next answer, in a shuffled order, whose prompt and text are both different."""
        place, total = int(self._place[number]), len(self)
        for step in range(1, min(PARTNERS, total - 1) + 1):
            messages = self[int(self._order[(place + step) % total])]["messages"]
            if messages[-1] != answer and messages[:-1] != prompt:
                partner: Message = messages[-1]
                return partner
        return None
