"""The journal of a run that may be killed: which tensors are finished, and what they are.

It lies in the staging folder. Its first line says what is being made of what: a digest of the plan
and of the inputs' files. Every further line is one finished tensor, written after the tensor's
bytes. A second run with the same first line keeps those tensors, after reading and hashing them
again: so neither a torn line nor a page that never reached the disk can do harm, and no tensor has
to be flushed before it may be entered.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.file_ranges import write_refused
from tasks.weights.files.source import Extent, Source
from tasks.weights.plan.operations import Plan

JOURNAL = ".journal.jsonl"


@dataclass(frozen=True)
class Outcome:
    """One finished tensor.

    Attributes:
        name: its key.
        file: output file that holds it.
        sha256: of its bytes.
        nonfinite: elements that are NaN or infinite; 0 too where nothing had to be read.
        all_zero: whether every element is zero; None where nobody looked.
        changed: fraction of elements that its terms changed; None without terms.
        error: squared Frobenius norm of what 4 bits lost; None where training did not quantise.
        delta: squared Frobenius norm of what the terms add; None likewise.
    """

    name: str
    file: str
    sha256: str
    nonfinite: int = 0
    all_zero: bool | None = None
    changed: float | None = None
    error: float | None = None
    delta: float | None = None


@dataclass
class Measured:
    """What was seen while a tensor was computed: as in `Outcome`, `changed` in elements."""

    nonfinite: int = 0
    changed: int = 0
    error: float | None = None
    delta: float | None = None


class Journal:
    """The journal of one output folder; thread safe.

    Args:
        root: the staging folder.
        identity: what is made of what; see `identify`.
    """

    def __init__(self, root: Path, identity: str) -> None:
        self._path, self._identity = root / JOURNAL, identity
        self._lock = threading.Lock()
        found = read_outcomes(self._path, identity)
        self.found: dict[str, Outcome] = {one.name: one for one in found}
        """What an earlier run entered; to be verified."""
        self.entries = len(found)
        """How many tensors are finished, as far as the journal says."""
        self.begin(found)

    def begin(self, outcomes: Iterable[Outcome]) -> None:
        """Write the journal anew with these entries, by one rename."""
        lines = [{"identity": self._identity}, *map(asdict, outcomes)]
        fresh = self._path.with_suffix(".new")
        with self._writing():
            fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
            fresh.rename(self._path)

    def enter(self, outcome: Outcome) -> None:
        """Add a finished tensor, by one `write`. Raises ArtifactError: a full disk."""
        line = (json.dumps(asdict(outcome)) + "\n").encode()
        with self._lock, self._writing(), self._path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):  # the rest of the line would find no room either
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.entries += 1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_refused(self._path, error) from error

    def remove(self) -> None:
        """There is nothing to go on with."""
        self._path.unlink(missing_ok=True)


def read_outcomes(path: Path, identity: str | None = None) -> list[Outcome]:
    """What a journal holds; nothing where it is absent, torn at the start, or of something else.

    Args:
        path: the journal's file.
        identity: only if it is this one; None takes any.
    """
    try:
        first, *lines = path.read_text().splitlines()
        said = json.loads(first)["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if identity is not None and said != identity:
        return []
    found: list[Outcome] = []
    for line in lines:
        try:
            found.append(Outcome(**json.loads(line)))
        except (ValueError, TypeError):
            break  # the line that was being written when the process ended
    return found


def identify(plan: Plan, sources: Mapping[str, Source], stem: str) -> str:
    """sha256 over the plan and over what is known of every input without reading it.

    Of a file: size, mtime, inode and device (not ctime: a hard link to it changes that); of a
    tensor: its place, and its sha256 where the source knows it.
    """
    digest = hashlib.sha256(json.dumps([plan.as_json(), stem], sort_keys=True).encode())
    stats: dict[Path, list[int]] = {}
    for name in sorted(sources):
        source = sources[name]
        for key in sorted(source.tensors):
            extents = [_place(one, stats) for one in source.extents(key)]
            digest.update(json.dumps([name, key, source.sha256(key), extents]).encode())
    return digest.hexdigest()


def _place(extent: Extent, stats: dict[Path, list[int]]) -> list[Any]:
    if extent.path not in stats:
        try:
            stat = extent.path.stat()
        except OSError as error:
            raise ArtifactError(f"{extent.path}: cannot be read: {error.strerror}") from error
        stats[extent.path] = [
            stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev,
        ]  # fmt: skip
    return [*stats[extent.path], extent.start, extent.nbytes]
