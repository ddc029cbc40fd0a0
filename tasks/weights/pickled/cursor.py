"""Read the instructions of a pickle and the values that follow them."""

from __future__ import annotations

import codecs
import struct
from typing import Any

from tasks.weights.pickled.objects import DamagedError, Foreign, TruncatedError, UnresolvedError

_MAX_LONG = 64
_PROTOCOLS = 5
_NUMBER = b"0123456789+-. \tinfNIaA"
"""First characters of a number in text; C's unpickler accepts more after them than `int` does."""


class Cursor:
    """A position in the bytes of a pickle.

    Every method raises DamagedError where Python's unpickler does, before it believes a size.

    Args:
        data: bytes that contain the pickle.
        at: offset of the pickle.

    Attributes:
        data: those bytes.
        at: offset of the next byte.
        blobs: the byte strings so far.
    """

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.blobs: list[bytes] = []
        self._frame_end = 0

    def take(self, count: int) -> bytes:
        """Read bytes. Raises UnresolvedError where they cross the end of a frame."""
        start, end = self.at, self.at + count
        if count < 0 or end > len(self.data):
            raise TruncatedError(f"cut short at byte {start}", end)
        if start < self._frame_end < end:  # there C's and Python's unpicklers read other bytes
            raise UnresolvedError(f"an instruction at byte {start} crosses the end of its frame")
        self.at = end
        return self.data[start:end]

    def number(self, form: str) -> Any:
        """Read a number in a `struct` format."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        """Read a line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise TruncatedError(f"a line without an end at byte {self.at}", len(self.data) + 1)
        return self.take(end + 1 - self.at)[:-1]

    def index(self, form: str) -> int:
        """Read an index of the memo in a `struct` format; the empty one is a line of text."""
        return self.number(form) if form else int(self.line().split(b"\0")[0])

    def number_line(self, kind: str) -> Any:
        """Read a number in text: I for integers and booleans, L for long integers, F for floats.

        A number in an unusual notation becomes a placeholder.
        """
        line = self.line()
        if not line or line[0] not in _NUMBER:
            raise DamagedError(f"a number that is none at byte {self.at}")
        if kind == "I" and line in (b"00", b"01"):
            return line == b"01"
        text = line.rstrip(b"L").decode()
        try:
            return float(text) if kind == "F" else int(text, 0)
        except ValueError:
            return Foreign("a number")

    def long(self, form: str) -> Any:
        """Read an integer after its size; one above 64 bytes becomes a placeholder."""
        raw = self.take(self.number(form))
        if len(raw) > _MAX_LONG:
            return Foreign("a number")
        return int.from_bytes(raw, "little", signed=True)

    def text(self, form: str) -> Any:
        """Read a string after its size; the empty format is a line of text."""
        raw = self.take(self.number(form)) if form else self.line()
        coding = "utf-8" if form else "raw-unicode-escape"
        try:
            return raw.decode(coding)
        except UnicodeDecodeError:
            raw.decode(coding, "surrogatepass")  # which Python accepts, and no name has
            return Foreign("builtins.str")

    def string(self, form: str) -> Any:
        """Read a string of Python 2 after its size; the empty format is a quoted line."""
        if form:
            raw = self.take(self.number(form))
        else:
            line = self.line().rstrip()
            if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
                raise DamagedError(f"a string without quotes at byte {self.at}")
            raw = codecs.escape_decode(line[1:-1])[0]
        self.blobs.append(raw)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # depends on the reader's `encoding`
            return Foreign("builtins.str")

    def bytes_of(self, form: str) -> bytes:
        """Read bytes after their size."""
        self.blobs.append(self.take(self.number(form)))
        return self.blobs[-1]

    def protocol(self) -> None:
        """Read the number of the protocol."""
        if self.take(1)[0] > _PROTOCOLS:
            raise DamagedError(f"an unknown protocol at byte {self.at - 1}")

    def frame(self) -> None:
        """Read the size of a frame."""
        if self.at < self._frame_end:
            raise UnresolvedError(f"a frame within a frame at byte {self.at}")
        size = self.number("<Q")
        if size > len(self.data) - self.at:
            raise TruncatedError(f"a frame cut short at byte {self.at}", self.at + size)
        self._frame_end = self.at + size
