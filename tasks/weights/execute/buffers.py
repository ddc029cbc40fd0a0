"""Memory that is used again: a run needs as much at its end as at its start.

Taken from the system page by page and given back whole, not from the heap, which keeps what
tensors of many sizes leave behind.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray


def pages(nbytes: int) -> NDArray[np.uint8]:
    """So many bytes of zeros, aligned to a page; the system has them back with the last view."""
    found: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
    return found[:nbytes]


class Buffer:
    """One piece of memory that grows to the largest size asked for."""

    def __init__(self) -> None:
        self._held: NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._held.size

    def first(self, nbytes: int) -> NDArray[np.uint8]:
        """Its first `nbytes`; overwrites what the last call gave."""
        if self._held.size < nbytes:
            self._held = pages(nbytes)
        return self._held[:nbytes]


class Workspace:
    """What one tensor in the making works in.

    Attributes:
        read: the worker's, shared by its tensors: holds nothing from one block to the next.
        out: the tensor's own: what it needs from one block to the next, and the block itself, which
            waits there until those of the others are made.
    """

    def __init__(self, read: Buffer) -> None:
        self.read, self.out = read, Buffer()
