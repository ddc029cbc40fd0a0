"""Compute SHA-256 of several tensors side by side.

    first, second = stream(), stream()
    advance([(first, block), (second, another_block)])
    first.hexdigest()

One SHA-256 is a chain of dependent steps: a core hashes 0.2 to 0.4 GB/s. Eight of them in the lanes
of a vector register reach 1.5 to 2.5 GB/s (`sha256_lanes.c`). A CPU with SHA instructions is as
fast with one stream at a time through OpenSSL, which is used there, and where kernels cannot be
compiled. The digests are the same.
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
"""Number of streams worth advancing at once; the same number is in `sha256_lanes.c`."""
_BLOCK = 64
_START = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip


class Stream(Protocol):
    """A hash in progress."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


class _Whole:
    """Hash by OpenSSL."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def hexdigest(self) -> str:
        return self.digest.hexdigest()


class _Lane:
    """State of a hash between calls: eight words, bytes short of a whole block, and the length."""

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
    """Start a new hash."""
    kernels = library() if side_by_side() else None
    return _Whole() if kernels is None else _Lane(kernels)


@cache
def side_by_side() -> bool:
    """Return True if hashing several streams at once is faster on this machine."""
    return not cpu_flags() & {"sha_ni", "sha2"} and library() is not None


def advance(pairs: Sequence[tuple[Stream, Any]]) -> None:
    """Add bytes to several different streams at once.

    Args:
        pairs: streams made by `stream()`, each with its bytes: anything that supports the buffer
            protocol.
    """
    rests: list[tuple[_Lane, NDArray[np.uint8]]] = []
    bodies: list[tuple[_Lane, NDArray[np.uint8]]] = []
    for item, raw in pairs:
        if isinstance(item, _Whole):
            item.digest.update(raw)
        elif isinstance(item, _Lane):
            rest, body = _whole_blocks(item, np.frombuffer(raw, np.uint8))
            rests += [(item, rest)] if rest.size else []
            bodies += [(item, body)] if body.size else []
    for pieces in (rests, bodies):  # one after the other: a stream may have both
        if pieces:
            states = [lane.state for lane, _ in pieces]
            pieces[0][0].kernels.sha256_update(states, [piece for _, piece in pieces])


def _whole_blocks(
    lane: _Lane, raw: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the completed earlier rest and the whole blocks after it; keep what is left over."""
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
