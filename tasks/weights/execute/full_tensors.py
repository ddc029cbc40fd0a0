"""Tensors that cannot be made by blocks of rows: quantised, transposed, with norms of columns."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.copying import opened
from tasks.weights.execute.journal import Measured
from tasks.weights.files.reader import DTYPE_NAMES, torch_dtype
from tasks.weights.files.source import Source
from tasks.weights.plan.operations import Op
from tasks.weights.quantized.packed import STORED

if TYPE_CHECKING:
    import torch

Sources = Mapping[str, Source]


def needs_whole(op: Op) -> bool:
    """Whether the whole tensor is in memory while it is computed.

    4-bit quantisation, whose second level takes a mean over all of it; a transposed source; and
    terms whose norms run down the columns.
    """
    return op.quantization is not None or op.transpose or all_rows(op)


def all_rows(op: Op) -> bool:
    """Whether terms see all rows at once: norms that run down the columns."""
    from tasks.weights.execute.kernels import needs_all_rows

    return any(needs_all_rows(term) for term in op.terms)


def whole(op: Op, sources: Sources, found: Measured) -> torch.Tensor:
    """The whole source tensor as the output is shaped, through 4 bits where the plan says so."""
    shape = op.read_shape
    wanted = (*shape[:-2], shape[-1], shape[-2]) if op.transpose else shape
    stored = _flat(op, sources).reshape(wanted)
    if op.transpose:
        stored = stored.transpose(-1, -2).contiguous()
    if op.quantization is None or STORED in op.quantization:
        return stored
    return _quantised(stored, op.quantization, found)


def _flat(op: Op, sources: Sources) -> torch.Tensor:
    """The elements that `op` starts from, decoded where they are stored in 4 bits."""
    import torch

    if op.quantization is not None and STORED in op.quantization:
        from tasks.weights.quantized.decode import decoded

        whole = decoded(op.quantization[STORED], sources[op.input].extents(op.key))
        return whole.reshape(-1)[op.start : op.start + prod(op.read_shape)]
    with opened(op, sources) as reader:
        buffer: NDArray[np.uint8] = np.empty(reader.nbytes, np.uint8)
        reader.into(buffer, 0)
    return torch.from_numpy(buffer).view(torch_dtype(op.source_dtype))


def _quantised(
    stored: torch.Tensor, quantization: Mapping[str, Any], found: Measured
) -> torch.Tensor:
    """The base as training saw it, or as it is stored where only the error is asked for."""
    from tasks.weights.quantized.nf4 import as_trained

    loaded = stored.to(torch_dtype(DTYPE_NAMES[quantization["loaded_dtype"]]))
    seen = as_trained(loaded, quantization).to(stored.dtype)
    found.error = squared(stored.float() - seen.float())
    return seen if quantization["base"] == "dequantized" else stored


def squared(tensor: torch.Tensor) -> float:
    """Squared Frobenius norm."""
    return float(tensor.double().square().sum())
