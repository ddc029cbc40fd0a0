"""Rows of a dataset artifact by number, read on demand; only an index of lines is in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.errors import DataError

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
