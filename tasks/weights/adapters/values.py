"""The one pass over an adapter's data before anything is written: finite, and not all zero."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.adapters.read import Adapter
from tasks.weights.files.dtype_bits import all_zero, nonfinite
from tasks.weights.files.file_ranges import Reader

_BLOCK = 4 << 20
_FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?$")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def require_values(adapters: Sequence[Adapter], copies: Mapping[str, str] | None = None) -> None:
    """Check the numbers of all adapters, and that what counts as a copy is one.

    Args:
        adapters: as they go into `changes`.
        copies: as `Changes` has them.

    Raises:
        ContractError: with every finding.
    """
    found = [f"{one.root.name}: {text}" for one in adapters for text in value_findings(one)]
    by_name = {one.name: one for one in adapters}
    for copy, original in (copies or {}).items():
        name, _, key = copy.partition(":")
        of = original.partition(":")[2]
        if not _same(by_name[name], key, of):
            found.append(f"{by_name[name].root.name}: {key}: is not the same as {of}, as it has to")
    if found:
        raise ContractError(f"adapter: {first_and_more(found)}", details=found)


def value_findings(adapter: Adapter) -> Iterator[str]:
    """What is wrong with the numbers: NaN or infinity anywhere, a factor that is all zero.

    A or B of a pair that is all zero adds nothing: the adapter was never trained, or not all of it.
    Only an expert that has a pair of its own may be so, since no token may have come its way, as
    long as others of its layer are not.
    """
    zeros: dict[str, list[str]] = {}
    used: set[str] = set()
    for key, info in sorted(adapter.tensors.tensors.items()):
        bad, zero = 0, True
        for raw in _blocks(adapter, key):
            bad += nonfinite(raw, info.dtype)
            zero = zero and all_zero(raw, info.dtype)
        if bad:
            yield f"{key}: {bad} elements are NaN or infinite"
        together = _EXPERT.sub(".experts.*.", key)
        if not zero:
            used.add(together)
        elif _FACTOR.search(key):
            zeros.setdefault(together, []).append(key)
    for key in sorted(key for name, keys in zeros.items() if name not in used for key in keys):
        yield f"{key}: all zero: the adapter was not trained here, or was not saved from it"


def _same(adapter: Adapter, key: str, of: str) -> bool:
    one, other = adapter.tensors.tensors[key], adapter.tensors.tensors[of]
    if (tuple(one.shape), one.dtype) != (tuple(other.shape), other.dtype):
        return False
    pairs = zip(_blocks(adapter, key), _blocks(adapter, of), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _blocks(adapter: Adapter, key: str) -> Iterator[NDArray[np.uint8]]:
    """A tensor's bytes in blocks, each valid until the next one is asked for."""
    with Reader(adapter.tensors.extents(key)) as stream:
        buffer: NDArray[np.uint8] = np.empty(min(_BLOCK, stream.nbytes), np.uint8)
        for at in range(0, stream.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, stream.nbytes - at)]
            stream.into(memoryview(block), at)
            yield block
