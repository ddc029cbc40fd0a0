"""Whether tensors of two folders are the same, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tasks.audit.source import Source
from tasks.weights.files.file_ranges import Reader

_BLOCK = 4 << 20


def first_difference(one: Source, other: Source, keys: Iterable[str]) -> str | None:
    """The first key under which two folders hold different bytes; None when there is none.

    Matrices of layers come first, which is where an adapter makes a difference: of a merge, little
    is read.

    Args:
        one: a folder.
        other: another one, with tensors of the same shapes and dtypes.
        keys: what to compare.

    Raises:
        ArtifactError: a file cannot be read, or elements do not lie in order.
    """
    order = sorted(keys, key=lambda key: (len(one.tensors[key].shape) < 2, "proj" not in key, key))
    return next((key for key in order if differ((one, key), (other, key))), None)


def differ(one: tuple[Source, str], other: tuple[Source, str]) -> bool:
    """Whether two tensors of the same size differ in any byte. Raises as `first_difference`."""
    (source, key), (source2, key2) = one, other
    total = source.tensors[key].nbytes
    left: NDArray[np.uint8] = np.empty(min(_BLOCK, total), np.uint8)
    right = np.empty_like(left)
    with Reader(source.extents(key)) as first, Reader(source2.extents(key2)) as second:
        for at in range(0, total, _BLOCK):
            size = min(_BLOCK, total - at)
            first.into(left[:size], at)
            second.into(right[:size], at)
            if not np.array_equal(left[:size], right[:size]):
                return True
    return False
