"""Tokenised examples on disk, memory-mapped, in the order of the dataset.

    ids.i32          token ids of all sequences, end to end (int32)
    bears.u8         1 for a token that bears loss, else 0; one byte per token
    lengths.i64      number of tokens of each sequence
    supervised.i64   number of tokens of each sequence that bear loss
    values.f32       numbers of the examples: margin, desirable
    names.jsonl      ids of the examples, one per line
    examples.json    roles, names of values, counts

An example has one sequence per role of the objective: one for SFT, a chosen and a rejected one for
pairs. Role `r` of example `e` is sequence `e * roles + r`. All ranks map the same files and read
only their own examples. Files can be concatenated: ranks write parts, which are joined.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DESCRIPTION = "examples.json"
FILES = ("ids.i32", "bears.u8", "lengths.i64", "supervised.i64", "values.f32", "names.jsonl")


class Tokens(NamedTuple):
    """One sequence: its token ids, and marks of those that bear loss."""

    ids: Sequence[int] | NDArray[np.int32]
    bears: Sequence[bool] | NDArray[np.uint8]


class Example(NamedTuple):
    """One tokenised example: a sequence per role, and its numbers by name."""

    name: str
    sequences: tuple[Tokens, ...]
    values: Mapping[str, float] = {}


@dataclass(frozen=True)
class Examples:
    """A tokenised split: E examples of R roles.

    Attributes:
        roles: names of an example's sequences.
        names: ids of the examples.
        ids: (tokens,) token ids of all sequences, end to end.
        bears: (tokens,) 1 for a token that bears loss.
        bounds: (E * R + 1,) offsets at which sequences begin and end.
        values: numbers of the examples by name, (E,) or (E, R), float32.
        counted: (E, R) result of `supervised`, if already known.
    """

    roles: tuple[str, ...]
    names: Sequence[str]
    ids: NDArray[np.int32]
    bears: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float32]]
    counted: NDArray[np.int64] | None = None

    @classmethod
    def of_texts(
        cls, texts: Sequence[ArrayLike], bears: NDArray[np.uint8] | None = None
    ) -> Examples:
        """Return examples of one sequence each, without values.

        Args:
            texts: token ids of each sequence.
            bears: as the attribute; None: every token bears loss.
        """
        pieces = [np.asarray(text, np.int32) for text in texts]
        bounds: NDArray[np.int64] = np.cumsum([0, *(len(piece) for piece in pieces)])
        ids, names = np.concatenate(pieces), [str(number) for number in range(len(pieces))]
        marks = np.ones(len(ids), np.uint8) if bears is None else bears
        return cls(("text",), names, ids, marks, bounds, {})

    def __len__(self) -> int:
        """Return the number of examples."""
        return (len(self.bounds) - 1) // len(self.roles)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, (E, R)."""
        return np.diff(self.bounds).reshape(len(self), len(self.roles))

    @property
    def supervised(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence that bear loss, (E, R)."""
        if self.counted is not None:
            return self.counted
        sums = np.concatenate([[0], np.cumsum(self.bears, dtype=np.int64)])
        return np.diff(sums[self.bounds]).reshape(len(self), len(self.roles))

    def sequence(self, example: int, role: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return token ids and loss marks of one sequence, as views of the mapped files."""
        number = example * len(self.roles) + role
        start, end = self.bounds[number], self.bounds[number + 1]
        return self.ids[start:end], self.bears[start:end]


class Names(Sequence[str]):
    """The ids of the examples, for messages; the file is read at every access.

    Args:
        path: file with one JSON string per line.
        count: number of lines.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        lines = self._path.read_text(encoding="ascii").splitlines()[index]
        return tuple(map(json.loads, lines)) if isinstance(lines, list) else json.loads(lines)


class Writer:
    """Writes examples one by one and keeps none in memory. A context manager.

    The folder is complete only after `describe`.

    Args:
        folder: an existing folder.
        roles: names of the sequences of every example.
    """

    def __init__(self, folder: Path, *, roles: Sequence[str]) -> None:
        self._folder, self._roles = folder, tuple(roles)
        self._open = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self.values: tuple[str, ...] | None = None

    def __enter__(self) -> Writer:
        for name in FILES:
            self._files[name] = self._open.enter_context((self._folder / name).open("wb"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def add(self, example: Example) -> None:
        """Append one example.

        Raises:
            ValueError: the example has other roles or other values than those before it.
        """
        if len(example.sequences) != len(self._roles):
            count, roles = len(example.sequences), len(self._roles)
            raise ValueError(f"{example.name}: {count} sequences for {roles} roles")
        if self.values is None:
            self.values = tuple(sorted(example.values))
        if tuple(sorted(example.values)) != self.values:
            raise ValueError(f"{example.name}: values {sorted(example.values)}, not {self.values}")
        for sequence in example.sequences:
            bears = np.asarray(sequence.bears, np.uint8)
            self._put("ids.i32", sequence.ids, np.int32)
            self._put("bears.u8", bears, np.uint8)
            self._put("lengths.i64", [len(bears)], np.int64)
            self._put("supervised.i64", [int(bears.sum())], np.int64)
        self._put("values.f32", [example.values[name] for name in self.values], np.float32)
        self._files["names.jsonl"].write(json.dumps(example.name).encode() + b"\n")

    def _put(self, name: str, values: ArrayLike, dtype: type[np.generic]) -> None:
        self._files[name].write(np.asarray(values, dtype).tobytes())


def join_parts(folder: Path, parts: Sequence[Path]) -> None:
    """Concatenate the files of several writers, in order, into an existing folder."""
    for name in FILES:
        with (folder / name).open("wb") as whole:
            for part in parts:
                with (part / name).open("rb") as file:
                    shutil.copyfileobj(file, whole)


def describe(
    folder: Path, *, roles: Sequence[str], values: Sequence[str], notes: Mapping[str, Any]
) -> None:
    """Write examples.json: names of roles and of the examples' numbers, and counts."""
    document = {"roles": list(roles), "values": list(values), "notes": dict(notes)}
    (folder / DESCRIPTION).write_text(json.dumps(document, indent=1) + "\n")


def open_examples(folder: Path) -> Examples:
    """Map a folder of examples."""
    document = json.loads((folder / DESCRIPTION).read_text())
    roles, names = tuple(document["roles"]), document["values"]
    lengths = np.fromfile(folder / "lengths.i64", np.int64)
    count = len(lengths) // len(roles)
    table = np.fromfile(folder / "values.f32", np.float32).reshape(count, len(names))
    return Examples(
        roles=roles,
        names=Names(folder / "names.jsonl", count),
        ids=np.memmap(folder / "ids.i32", np.int32, "r"),
        bears=np.memmap(folder / "bears.u8", np.uint8, "r"),
        bounds=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        values={name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)},
        counted=np.fromfile(folder / "supervised.i64", np.int64).reshape(count, len(roles)),
    )


def notes_of(folder: Path) -> dict[str, Any]:
    """Return the notes in a folder's examples.json."""
    notes: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())["notes"]
    return notes
