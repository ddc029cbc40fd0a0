"""SHA-256 of several tensors side by side.

    one, two = stream(), stream()
    advance([(one, raw), (two, other)])
    one.hexdigest()

One SHA-256 is a chain of dependent steps, and keeps a core busy at 0.2 to 0.4 GB/s; eight of them
in the lanes of a vector run at 1.5 to 2.5 GB/s (`native/sha256_lanes.c`). A CPU with instructions
for SHA-256 does as well one at a time, through OpenSSL; so it is taken there, and where no kernels
can be compiled. The digests are the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.weights.native import Library, library
from tasks.weights.native.compiled import cpu_flags

LANES = 8
"""How many streams are worth advancing at once; as in `sha256_lanes.c`."""
_BLOCK = 64
_START = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip


class Stream(Protocol):
    """A hash in the making."""

    def hexdigest(self) -> str:
        """Of everything so far."""


class _Whole:
    """By OpenSSL."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def hexdigest(self) -> str:
        return self.digest.hexdigest()


class _Lane:
    """State between calls: eight words, the bytes that make no whole block yet, the length."""

    def __init__(self, kernels: Library) -> None:
        self.kernels = kernels
        self.state: NDArray[np.uint32] = np.array(_START, np.uint32)
        self.rest: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.length = 0

    def hexdigest(self) -> str:
        zeros = bytes((_BLOCK - 9 - self.rest.size) % _BLOCK)
        tail = self.rest.tobytes() + b"\x80" + zeros + struct.pack(">Q", 8 * self.length)
        state = self.state.copy()
        self.kernels.sha256_update([state], [np.frombuffer(tail, np.uint8)])
        return struct.pack(">8I", *state.tolist()).hex()


def stream() -> Stream:
    """A new hash."""
    kernels = library() if side_by_side() else None
    return _Whole() if kernels is None else _Lane(kernels)


@cache
def side_by_side() -> bool:
    """Whether streams are hashed in lanes here, so that it pays to advance several at once."""
    return not cpu_flags() & {"sha_ni", "sha2"} and library() is not None


def advance(pairs: Sequence[tuple[Stream, Any]]) -> None:
    """Add bytes to streams, different ones, all at once.

    Args:
        pairs: streams of `stream()`, and what each gets: anything with a buffer of bytes.
    """
    rests: list[tuple[_Lane, NDArray[np.uint8]]] = []
    bodies: list[tuple[_Lane, NDArray[np.uint8]]] = []
    for one, raw in pairs:
        if isinstance(one, _Whole):
            one.digest.update(raw)
        elif isinstance(one, _Lane):
            rest, body = _whole_blocks(one, np.frombuffer(raw, np.uint8))
            rests += [(one, rest)] if rest.size else []
            bodies += [(one, body)] if body.size else []
    for pieces in (rests, bodies):  # one after the other: a stream may have both
        if pieces:
            states = [lane.state for lane, _ in pieces]
            pieces[0][0].kernels.sha256_update(states, [piece for _, piece in pieces])


def _whole_blocks(
    lane: _Lane, raw: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The earlier rest filled up, and the whole blocks after it; what is over becomes the rest."""
    lane.length += raw.size
    filled: NDArray[np.uint8] = raw[:0]
    if lane.rest.size:
        taken = min(_BLOCK - lane.rest.size, raw.size)
        lane.rest, raw = np.concatenate([lane.rest, raw[:taken]]), raw[taken:]
        if lane.rest.size < _BLOCK:
            return filled, raw
        filled = lane.rest
    whole = raw.size // _BLOCK * _BLOCK
    lane.rest = raw[whole:].copy()
    return filled, raw[:whole]
