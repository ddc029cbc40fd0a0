"""Journal of a run that may be killed: its finished tensors, with their hashes and statistics.

The journal lies in the staging folder. Its first line identifies the run: a digest of the plan and
of the inputs' files. Every further line is one finished tensor, entered after its bytes were
written. A later run with the same first line reads and hashes those tensors again and keeps them.
So neither a torn line nor a page that never reached the disk does harm, and no tensor has to be
flushed to disk before it is entered.
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

from tasks.core.disk import write_refused
from tasks.core.errors import ArtifactError
from tasks.weights.files.source import Extent, Source
from tasks.weights.plan.operations import Plan

JOURNAL = ".journal.jsonl"


@dataclass(frozen=True)
class Outcome:
    """Result of one finished tensor.

    Attributes:
        name: its key.
        file: output file that holds it.
        checksum: BLAKE3 hash of its bytes.
        nonfinite: number of NaN or infinite elements; also 0 if the values were not read.
        all_zero: True if every element is zero; None if the values were not inspected.
        changed: fraction of elements that the adapter changed; None if it has no terms for it.
        error: squared Frobenius norm of the 4-bit quantization error; None if training did not
            quantize the tensor.
        delta: squared Frobenius norm of the adapter's change D; None like `changed`.
        kept: `<Q - W, D>` of the base W and the written tensor Q: `delta` if all is kept.
        nearest: the same for the sum rounded to nearest.
    """

    name: str
    file: str
    checksum: str
    nonfinite: int = 0
    all_zero: bool | None = None
    changed: float | None = None
    error: float | None = None
    delta: float | None = None
    kept: float | None = None
    nearest: float | None = None


@dataclass
class Measured:
    """Statistics of a tensor while it is computed; as in `Outcome`, but `changed` is a count."""

    nonfinite: int = 0
    changed: int = 0
    error: float | None = None
    delta: float = 0.0
    kept: float = 0.0
    nearest: float = 0.0


class Journal:
    """Journal of one output folder; thread safe.

    Args:
        root: the staging folder.
        identity: digest of the plan and the inputs, from `identify`.

    Attributes:
        recorded: outcomes that an earlier run entered, by name; to be verified.
        entries: number of finished tensors according to the journal.
    """

    def __init__(self, root: Path, identity: str) -> None:
        self._path, self._identity = root / JOURNAL, identity
        self._lock = threading.Lock()
        outcomes = read_outcomes(self._path, identity)
        self.recorded = {outcome.name: outcome for outcome in outcomes}
        self.entries = len(outcomes)
        self.begin(outcomes)

    def begin(self, outcomes: Iterable[Outcome]) -> None:
        """Replace the journal by these entries, with one rename."""
        lines = [{"identity": self._identity}, *map(asdict, outcomes)]
        fresh = self._path.with_suffix(".new")
        with self._writing():
            fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
            fresh.rename(self._path)

    def enter(self, outcome: Outcome) -> None:
        """Add a finished tensor, with one `write`. Raises ArtifactError if the disk is full."""
        line = (json.dumps(asdict(outcome)) + "\n").encode()
        with self._lock, self._writing(), self._path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):  # a short write means that the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.entries += 1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_refused(self._path, error) from error

    def remove(self) -> None:
        """Delete the journal: there is nothing to continue."""
        self._path.unlink(missing_ok=True)


def read_outcomes(path: Path, identity: str | None = None) -> list[Outcome]:
    """Return a journal's entries; none if it is absent, torn at the start, or another run's.

    Args:
        path: file of the journal.
        identity: identity that the journal must have; None accepts any.
    """
    try:
        first, *lines = path.read_text().splitlines()
        recorded = json.loads(first)["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if identity is not None and recorded != identity:
        return []
    outcomes: list[Outcome] = []
    for line in lines:
        try:
            outcomes.append(Outcome(**json.loads(line)))
        except (ValueError, TypeError):
            break  # the process ended while it wrote this line
    return outcomes


def identify(plan: Plan, sources: Mapping[str, Source], stem: str) -> str:
    """Return a sha256 over the plan and everything known of the inputs without reading their data.

    That is size, mtime, inode and device of every file (not ctime, which a hard link changes), the
    byte ranges of every tensor, and its hash if the source knows it.
    """
    digest = hashlib.sha256(json.dumps([plan.as_json(), stem], sort_keys=True).encode())
    stats: dict[Path, list[int]] = {}
    for name in sorted(sources):
        source = sources[name]
        for key in sorted(source.tensors):
            extents = [_place(extent, stats) for extent in source.extents(key)]
            digest.update(json.dumps([name, key, source.checksum(key), extents]).encode())
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
