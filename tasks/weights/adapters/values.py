"""Check an adapter's numbers before anything is written: finite, and not all of them zero."""

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


def require_values(adapters: Sequence[Adapter], copies: Mapping[str, str] | None = None) -> None:
    """Check the numbers of all adapters, and that dropped copies equal their originals.

    Args:
        adapters: the adapters that are merged.
        copies: `Changes.copies`: dropped tensor -> tensor that must have the same bytes.

    Raises:
        ContractError: lists every finding.
    """
    findings = [
        f"{adapter.root.name}: {text}" for adapter in adapters for text in value_findings(adapter)
    ]
    by_name = {adapter.name: adapter for adapter in adapters}
    for copy, original in (copies or {}).items():
        name, _, key = copy.partition(":")
        of = original.partition(":")[2]
        if not _same(by_name[name], key, of):
            findings.append(
                f"{by_name[name].root.name}: {key}: differs from {of}, of which it must be a copy"
            )
    if findings:
        raise ContractError(f"adapter: {first_and_more(findings)}", details=findings)


def value_findings(adapter: Adapter) -> Iterator[str]:
    """Yield the tensors with NaN or infinity, magnitudes of zeros, and an adapter without effect.

    A pair with an all-zero A or B changes nothing. Some may: a module that saw no data stays as it
    was initialised. If all do, the adapter was not trained, or not saved from the trained model.
    """
    pairs: set[str] = set()
    zeros: set[str] = set()
    for key, info in sorted(adapter.tensors.tensors.items()):
        bad, zero = 0, True
        for raw in _blocks(adapter, key):
            bad += nonfinite(raw, info.dtype)
            zero = zero and all_zero(raw, info.dtype)
        if bad:
            yield f"{key}: {bad} elements are NaN or infinite"
        if (factor := _FACTOR.search(key)) is None:
            continue
        if factor[1] != "magnitude_vector":
            pairs.add(key[: factor.start()])
            zeros |= {key[: factor.start()]} if zero else set()
        elif zero:
            yield f"{key}: all zero: not saved from the trained model"
    if pairs and pairs == zeros:
        yield (
            f"all {len(pairs)} LoRA pairs have a factor that is all zero: the adapter was not "
            "trained, or not saved from the trained model"
        )


def _same(adapter: Adapter, key: str, of: str) -> bool:
    copy, original = adapter.tensors.tensors[key], adapter.tensors.tensors[of]
    if (tuple(copy.shape), copy.dtype) != (tuple(original.shape), original.dtype):
        return False
    pairs = zip(_blocks(adapter, key), _blocks(adapter, of), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _blocks(adapter: Adapter, key: str) -> Iterator[NDArray[np.uint8]]:
    """Yield a tensor's bytes in blocks; each block is valid until the next one is read."""
    with Reader(adapter.tensors.extents(key)) as stream:
        buffer: NDArray[np.uint8] = np.empty(min(_BLOCK, stream.nbytes), np.uint8)
        for at in range(0, stream.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, stream.nbytes - at)]
            stream.into(memoryview(block), at)
            yield block
