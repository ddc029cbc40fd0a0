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
_CHUNK = 16 << 20


class RowFile:
    """A JSON Lines file whose rows are read on demand.

    Args:
        path: the file.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            self._ends = self._line_ends()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ends)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return row `number`, counted from 0.

        Raises:
            DataError: the line is not a JSON object with an id; names file and line.
        """
        start = int(self._ends[number - 1]) if number else 0
        self._file.seek(start)
        line = self._file.read(int(self._ends[number]) - start)
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.path}:{number + 1}: not JSON: {error}") from error
        if not isinstance(row, dict) or "id" not in row:
            raise DataError(f"{self.path}:{number + 1}: not a row of a dataset: no id")
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line_ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the offset behind each line, (lines,)."""
        ends, offset, last = [], 0, b"\n"
        while chunk := self._file.read(_CHUNK):
            places = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            ends.append(places + offset + 1)
            offset, last = offset + len(chunk), chunk[-1:]
        if last != b"\n":  # the last line has no newline
            ends.append(np.array([offset]))
        return np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)


class Draft(NamedTuple):
    """An example before tokenisation, or the `problem` that makes its row unusable."""

    name: str
    conversations: tuple[Turns, ...] | tuple[Document]
    values: dict[str, float]
    problem: str = ""
    without_loss: int = 0  # answers of a conversation


def holds_texts(path: Path) -> bool:
    """Return True if the first row of a split is a raw text.

    Raises:
        DataError: the split cannot be read.
    """
    rows = RowFile(path)
    texts = len(rows) > 0 and "text" in rows[0]
    rows.close()
    return texts


class Drafts:
    """The drafts of a split, by number.

    Args:
        path: the split's JSON Lines file.
        roles: the objective's `roles`.
        mask: `train.mask`, the tokens of a conversation that bear loss.
        seed: seed of the order in which examples get their `mismatched` answers.

    Raises:
        ConfigError: the rows are not of the kind that the roles need.
        DataError: the split is empty or cannot be read.
    """

    def __init__(self, path: Path, *, roles: tuple[str, ...], mask: str, seed: int) -> None:
        self._rows, self._roles, self._mask = RowFile(path), roles, mask
        if not len(self._rows):
            raise DataError(f"{path}: no samples", hint="data.path=... or data.eval_fraction=...")
        first = self._rows[0]
        self._texts = "text" in first
        self._require_kind(first)
        if roles == LABELLED:
            self._order = np.random.default_rng(seed).permutation(len(self._rows))
            self._place = np.argsort(self._order)

    def __len__(self) -> int:
        """Return the number of drafts."""
        return len(self._rows)

    def __getitem__(self, number: int) -> Draft:
        """Return draft `number`, counted from 0."""
        row = self._rows[number]
        name = str(row["id"])
        try:
            if self._roles == PAIRS:
                return self._pair(name, row)
            if self._roles == LABELLED:
                return self._labelled(name, row, number)
            return self._conversation(name, row)
        except (KeyError, TypeError, IndexError) as error:
            return Draft(name, (), {}, f"not a row of {_KINDS[self._roles]}: {error!r}")

    def close(self) -> None:
        """Close the split's file."""
        self._rows.close()

    def _require_kind(self, row: dict[str, Any]) -> None:
        kind = PAIRS if "chosen" in row else LABELLED if "desirable" in row else CONVERSATIONS
        if self._roles not in _KINDS:
            raise ConfigError(f"no rows have the roles {', '.join(self._roles)}")
        if kind != self._roles:
            raise ConfigError(
                f"{self._rows.path} holds {_KINDS[kind]}, the objective needs "
                f"{_KINDS[self._roles]}",
                hint="make the dataset for this objective: prepare_data with train.objective=...",
            )
        if self._texts and self._mask != EVERY_TOKEN:
            raise ConfigError(
                f"train.mask={self._mask}, and {self._rows.path} holds raw texts, which have no "
                "answers",
                hint=f"train.mask={EVERY_TOKEN}",
            )

    def _conversation(self, name: str, row: dict[str, Any]) -> Draft:
        if self._texts:
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
            searched = min(PARTNERS, len(self._rows) - 1)
            return Draft(name, (), {}, f"none of {searched} other examples has another prompt and "
                         "another answer, which kto compares with")  # fmt: skip
        first = len(prompt)
        whole = (row["messages"], [*prompt, mismatched])
        both = tuple(Turns(each, first, tools=row.get("tools")) for each in whole)
        return Draft(name, both, {"desirable": float(bool(row["desirable"]))})

    def _partner(self, number: int, prompt: list[Message], answer: Message) -> Message | None:
        """Return the next answer, in a shuffled order, whose prompt and text are both different."""
        place, total = int(self._place[number]), len(self._rows)
        for step in range(1, min(PARTNERS, total - 1) + 1):
            messages = self._rows[int(self._order[(place + step) % total])]["messages"]
            if messages[-1] != answer and messages[:-1] != prompt:
                partner: Message = messages[-1]
                return partner
        return None
