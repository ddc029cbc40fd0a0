"""Tokenised examples: numpy arrays, memory-mapped from `.npy` files, in the order of the dataset.

An example has one sequence per role of the objective: one for SFT, a chosen and a rejected one for
pairs. Role `r` of example `e` is sequence `e * roles + r`. All ranks map the same files and read
only their own examples.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

VALUES = ("margin", "desirable")
"""Numbers that examples may have."""


class Tokens(NamedTuple):
    """One sequence: its token ids, and marks of those that bear loss."""

    ids: Sequence[int] | NDArray[np.int32]
    bears: Sequence[bool] | NDArray[np.uint8]


class Example(NamedTuple):
    """One example: a sequence per role, and its numbers by name (`VALUES`).

    Sequences are conversations or raw texts, and `Tokens` once they are tokenised.
    """

    name: str
    sequences: tuple[Any, ...] = ()
    values: Mapping[str, float] = {}
    without_loss: int = 0  # answers of a conversation that bear no loss
    problem: str = ""  # reason why it cannot be used


@dataclass(frozen=True)
class Examples:
    """A tokenised split: E examples of R roles."""

    roles: tuple[str, ...]  # names of an example's sequences
    names: Sequence[str] | NDArray[np.str_]  # ids of the examples
    ids: NDArray[np.int32]  # (tokens,) token ids of all sequences, end to end
    bears: NDArray[np.uint8]  # (tokens,) 1 for a token that bears loss
    bounds: NDArray[np.int64]  # (E * R + 1,) offsets at which sequences begin and end
    # numbers of the examples by name, (E,) or (E, R), float32
    values: Mapping[str, NDArray[np.float32]]

    @classmethod
    def of_texts(
        cls, texts: Sequence[ArrayLike], bears: NDArray[np.uint8] | None = None
    ) -> Examples:
        """Return examples of one sequence each, without values.

        Without `bears` every token bears loss.
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

    @cached_property
    def supervised(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence that bear loss, (E, R)."""
        sums: NDArray[np.int64] = np.add.reduceat(self.bears, self.bounds[:-1], dtype=np.int64)
        return sums.reshape(len(self), len(self.roles))

    def sequence(self, example: int, role: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return token ids and loss marks of one sequence, as views of the mapped files."""
        number = example * len(self.roles) + role
        start, end = self.bounds[number], self.bounds[number + 1]
        return self.ids[start:end], self.bears[start:end]


def all_but_first(ids: Any) -> Tokens:
    """Return a sequence of which every token bears loss but the first."""
    bears: NDArray[np.uint8] = np.ones(len(ids), np.uint8)
    bears[0] = 0
    return Tokens(ids, bears)


def save_examples(folder: Path, examples: Iterable[Example]) -> None:
    """Write examples as arrays into an existing folder."""
    names, ids, bears, lengths, values = [], array("i"), bytearray(), array("q"), array("f")
    for example in examples:
        names.append(example.name)
        values.extend(example.values.get(name, np.nan) for name in VALUES)
        for sequence in example.sequences:
            ids.frombytes(np.asarray(sequence.ids, np.int32).tobytes())
            bears += np.asarray(sequence.bears, np.uint8).tobytes()
            lengths.append(len(sequence.ids))
    arrays: dict[str, NDArray[Any]] = {
        "names": np.array(names, str),
        "ids": np.frombuffer(ids, np.int32),
        "bears": np.frombuffer(bears, np.uint8),
        "lengths": np.frombuffer(lengths, np.int64),
        "values": np.frombuffer(values, np.float32).reshape(-1, len(VALUES)),
    }
    for name, column in arrays.items():
        np.save(folder / f"{name}.npy", column)


def join_examples(folder: Path, parts: Sequence[Path]) -> None:
    """Concatenate the arrays of several folders, in order, into an existing folder."""
    open_memmap: Any = np.lib.format.open_memmap
    for file in sorted(parts[0].glob("*.npy")):
        pieces = [np.load(part / file.name, mmap_mode="r") for part in parts]
        shape = (sum(map(len, pieces)), *pieces[0].shape[1:])
        out = open_memmap(folder / file.name, "w+", np.result_type(*pieces), shape)
        np.concatenate(pieces, out=out)
        out.flush()


def open_examples(folder: Path, roles: tuple[str, ...]) -> Examples:
    """Map a folder of examples."""
    files = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    columns = dict(zip(VALUES, np.ascontiguousarray(files["values"].T), strict=True))
    return Examples(
        roles=roles,
        names=files["names"],
        ids=files["ids"],
        bears=files["bears"],
        bounds=np.concatenate([np.zeros(1, np.int64), np.cumsum(files["lengths"])]),
        values={name: column for name, column in columns.items() if not np.isnan(column).any()},
    )
