"""Load full tensors for operations that cannot work on blocks of rows.

These are 4-bit quantization, transposed sources, and terms that need norms of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from tasks.weights.execute.copying import opened
from tasks.weights.execute.outcome import Measured
from tasks.weights.files.dtypes import DTYPE_NAMES, torch_dtype
from tasks.weights.files.source import Source
from tasks.weights.plan import Op, needs_all_rows

if TYPE_CHECKING:
    import torch

Sources = Mapping[str, Source]


def needs_full_tensor(op: Op) -> bool:
    """Return True if the full tensor is in memory while it is computed.

    That is so for 4-bit quantization, whose double quantization takes a mean over all scales, for a
    transposed source, and for terms that need norms of columns.
    """
    return op.is_decoded or op.transpose or all_rows(op)


def all_rows(op: Op) -> bool:
    """Return True if a term needs all rows at once, because it takes norms of columns."""
    return any(needs_all_rows(term) for term in op.terms)


def full_tensor(op: Op, sources: Sources, measured: Measured) -> torch.Tensor:
    """Load the full source tensor in the output's shape, through 4 bits if the plan says so.

    Args:
        sources: inputs of the plan by name.
    """
    shape = op.read_shape
    wanted = (*shape[:-2], shape[-1], shape[-2]) if op.transpose else shape
    stored = _flat(op, sources).reshape(wanted)
    if op.transpose:
        stored = stored.transpose(-1, -2).contiguous()
    if op.quantization is None:
        return stored
    return _quantised(stored, op.quantization, measured)


def _flat(op: Op, sources: Sources) -> torch.Tensor:
    """Load the elements that `op` starts from, 1-D; a source stored in 4 bits is decoded."""
    import torch

    if op.packed is not None:
        from tasks.weights.quantized.source import decoded

        matrix = decoded(op.packed, sources[op.input].extents(op.key))
        return matrix.reshape(-1)[op.start : op.start + prod(op.read_shape)]
    with opened(op, sources) as reader:
        return torch.from_numpy(reader.read()).view(torch_dtype(op.source_dtype))


def _quantised(
    stored: torch.Tensor, quantization: Mapping[str, Any], measured: Measured
) -> torch.Tensor:
    """Return the base as QLoRA training used it, or as stored for a merge into the original."""
    from tasks.weights.quantized.nf4 import as_trained

    loaded = stored.to(torch_dtype(DTYPE_NAMES[quantization["loaded_dtype"]]))
    dequantized = as_trained(loaded, quantization)  # not rounded to the dtype on disk
    measured.error = squared(stored.float() - dequantized.float())
    return dequantized if quantization["base"] == "dequantized" else stored


def squared(tensor: torch.Tensor) -> float:
    """Return the squared Frobenius norm."""
    return float(tensor.double().square().sum())
