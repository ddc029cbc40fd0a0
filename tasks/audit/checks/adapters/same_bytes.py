"""Compare tensors of two folders byte for byte."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tasks.audit.source import Source
from tasks.weights.files.file_ranges import Reader

_BLOCK = 4 << 20


def first_difference(source: Source, reference: Source, keys: Iterable[str]) -> str | None:
    """Return the first key whose bytes differ between two folders; None if there is none.

    Matrices of layers come first, because adapters change them: a merged model needs few reads.

    Args:
        source: a folder.
        reference: a folder with tensors of the same shapes and dtypes.
        keys: the keys to compare.

    Raises:
        ArtifactError: a file cannot be read, or a tensor is not contiguous.
    """
    order = sorted(
        keys, key=lambda key: (len(source.tensors[key].shape) < 2, "proj" not in key, key)
    )
    return next((key for key in order if differ((source, key), (reference, key))), None)


def same_header(key: str, source: Source, reference: Source) -> bool:
    """Return True if both folders have the tensor, with the same shape and dtype."""
    tensor, other = source.tensors[key], reference.tensors.get(key)
    return other is not None and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def differ(a: tuple[Source, str], b: tuple[Source, str]) -> bool:
    """Return True if two tensors of the same size, each as (folder, key), differ in any byte.

    Raises:
        ArtifactError: a file cannot be read, or a tensor is not contiguous.
    """
    (source, key), (source2, key2) = a, b
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
