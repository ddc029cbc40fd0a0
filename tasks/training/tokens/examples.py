"""Tokenised examples on disk, memory-mapped: what is trained on, in the order of the dataset.

    ids.i32          token ids of all sequences, end to end (int32)
    bears.u8         1 for a token that bears loss, one byte a token
    lengths.i64      tokens of each sequence
    supervised.i64   tokens of each sequence that bear loss
    values.f32       numbers that an example carries: margin, desirable
    names.jsonl      the examples' ids, a line each
    examples.json    roles, names of values, counts, size and CRC-32 of every file; written last

An example is one sequence (SFT), or a chosen and a rejected one, or what else the `roles` of an
objective name. Sequence `example * roles + role` belongs to it. Ranks map the same files and touch
only what they are dealt. Every file can be appended to: ranks write parts, which are joined.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

DESCRIPTION = "examples.json"
FORMAT = 2
FILES = (
    "ids.i32",
    "bears.u8",
    "lengths.i64",
    "supervised.i64",
    "values.f32",
    "names.jsonl",
)
_CHUNK = 4 << 20


class Tokens(NamedTuple):
    """One sequence: its token ids, and for each whether it bears loss."""

    ids: Sequence[int] | NDArray[np.int32]
    bears: Sequence[bool] | NDArray[np.uint8]


class Example(NamedTuple):
    """One tokenised example: a sequence a role, and its numbers."""

    name: str
    sequences: tuple[Tokens, ...]
    values: Mapping[str, float] = {}


@dataclass(frozen=True)
class Examples:
    """E examples of R roles. `values` are of shape (E,) or (E, R), float32.

    Attributes:
        roles: names of an example's sequences.
        names: of the examples.
        ids: (tokens,) of all sequences, end to end.
        bears: (tokens,) 1 where a token bears loss.
        bounds: (E * R + 1,) where each sequence begins and ends.
        values: numbers of the examples, by name.
        counted: (E, R) what `supervised` says, where it was counted before.
    """

    roles: tuple[str, ...]
    names: Sequence[str]
    ids: NDArray[np.int32]
    bears: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float32]]
    counted: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """How many examples."""
        return (len(self.bounds) - 1) // len(self.roles)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every sequence, (E, R)."""
        return np.diff(self.bounds).reshape(len(self), len(self.roles))

    @property
    def supervised(self) -> NDArray[np.int64]:
        """Tokens that bear loss of every sequence, (E, R)."""
        if self.counted is not None:
            return self.counted
        sums = np.concatenate([[0], np.cumsum(self.bears, dtype=np.int64)])
        return np.diff(sums[self.bounds]).reshape(len(self), len(self.roles))

    def sequence(self, example: int, role: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss marks of one sequence; views of the mapped files."""
        number = example * len(self.roles) + role
        start, end = self.bounds[number], self.bounds[number + 1]
        return self.ids[start:end], self.bears[start:end]


class Names(Sequence[str]):
    """The examples' ids, read from their file when one is asked for: they are for messages."""

    def __init__(self, path: Path, count: int) -> None:
        """`path` has a JSON text a line, `count` of them."""
        self._path, self._count = path, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        lines = self._path.read_text(encoding="ascii").splitlines()[index]
        return tuple(map(json.loads, lines)) if isinstance(lines, list) else json.loads(lines)


class Writer:
    """Writes examples one by one into an existing folder; nothing of them stays in memory.

    Use as a context manager; the folder has no description until `describe`.
    """

    def __init__(self, folder: Path, *, roles: Sequence[str]) -> None:
        """`roles` name the sequences of every example."""
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
            ValueError: other roles or other values than the examples before it.
        """
        if len(example.sequences) != len(self._roles):
            raise ValueError(f"{example.name}: {len(example.sequences)} sequences, not a role each")
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


def write_examples(
    folder: Path, examples: Iterable[Example], *, roles: Sequence[str], notes: Mapping[str, Any]
) -> None:
    """Write `examples` into an existing empty folder; the description comes last.

    Args:
        folder: an existing directory.
        examples: at least one; each has a sequence a role, and all have the same values.
        roles: names of the sequences of an example.
        notes: counts and the like, kept in the description.
    """
    with Writer(folder, roles=roles) as writer:
        for example in examples:
            writer.add(example)
    describe(folder, roles=roles, values=writer.values or (), notes=notes)


def join_parts(folder: Path, parts: Sequence[Path]) -> None:
    """Append what several writers wrote to one another, in order. `folder` exists."""
    for name in FILES:
        with (folder / name).open("wb") as whole:
            for part in parts:
                with (part / name).open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        whole.write(chunk)


def describe(
    folder: Path, *, roles: Sequence[str], values: Sequence[str], notes: Mapping[str, Any]
) -> None:
    """Write the description, which makes the folder complete, and flush everything to disk."""
    document = {
        "format": FORMAT,
        "roles": list(roles),
        "values": list(values),
        "notes": dict(notes),
        "files": {name: _checksum(folder / name) for name in FILES},
    }
    (folder / DESCRIPTION).write_text(json.dumps(document, indent=1) + "\n")
    for name in (*FILES, DESCRIPTION):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def damage(folder: Path) -> str:
    """What is wrong with a folder that `describe` completed; empty when nothing is."""
    try:
        document = json.loads((folder / DESCRIPTION).read_text())
        if document["format"] != FORMAT:
            return f"format {document['format']}, not {FORMAT}"
        for name, wanted in document["files"].items():
            found = _checksum(folder / name)
            if found != wanted:
                return f"{name}: size and CRC-32 are {found}, not {wanted}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_examples(folder: Path) -> Examples:
    """Map what was written. What it says is trusted: `damage` checks it."""
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
    """The notes that were written with the examples."""
    notes: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())["notes"]
    return notes


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32."""
    value, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value, size = zlib.crc32(chunk, value), size + len(chunk)
    return [size, value]
