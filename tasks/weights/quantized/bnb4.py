"""Matrices that bitsandbytes packed in 4 bits: find, check and decode them, without torch.

bitsandbytes stores a matrix X of n elements in blocks of `blocksize` as

    X                                 ceil(n / 2) bytes, two elements each
    X.absmax                          one scale per block: F32, or U8 if scales are packed too
    X.quant_map                       the 16 values that 4 bits encode, F32
    X.quant_state.bitsandbytes__nf4   JSON: type, block size, dtype, shape
    X.nested_absmax, X.nested_quant_map   scales of packed scales, and the 256 values of 8 bits

NF4 and packed scales (double quantization): QLoRA, https://arxiv.org/abs/2305.14314.

The decoded bits are those of bitsandbytes, but its library is not called. Up to 0.50.2 its AVX-512
kernel uses wrong scales if a row is not a whole number of blocks (SigLIP has 4304 columns; the CUDA
kernels are right), and other cases go through `torch.compile`, which takes seconds per shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import describe
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, cast
from tasks.weights.files.tensors import Reader, Tensors
from tasks.weights.quantized.fp8 import Packed

STATE = ".quant_state."
_STATES = {f"{STATE}bitsandbytes__{kind}": kind for kind in ("nf4", "fp4")}
_SCALES, _TABLE = ".absmax", ".quant_map"
_NESTED_SCALES, _NESTED_TABLE = ".nested_absmax", ".nested_quant_map"
_SIDES = (_SCALES, _TABLE, _NESTED_SCALES, _NESTED_TABLE)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that bitsandbytes 0.50 decodes."""
LEVELS = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip
"""Values of the codes 0 to 15. bitsandbytes' kernels have them built in and ignore `quant_map`.

Code 8 of FP4 is a second zero: 0.0 here and in bitsandbytes' AVX-512 kernel, -0.0 in its scalar
one."""
_STEP = 1 << 20
"""Elements decoded per step: a multiple of every block size."""
_MAX_STATE = 1 << 16
"""Largest size of the JSON in bytes; bitsandbytes writes less than 200."""
_CLOSE = 1e-6
"""Tolerance with which bitsandbytes compares two tables."""


def read_states(checkpoint: Tensors) -> tuple[dict[str, Packed], list[str]]:
    """Find the packed matrices of a checkpoint; reads headers, their JSON and their 16 values.

    Returns the packing by key, and one line for every matrix that cannot be decoded.
    """
    matrices: dict[str, Packed] = {}
    findings: list[str] = []
    owners = _owners(checkpoint)
    for key, sides in owners.items():
        try:
            matrices[key] = _packed(checkpoint, key, sides)
        except (ValueError, RecursionError) as error:
            findings.append(f"{key}: {error}")
    for key, info in checkpoint.items():
        if key not in owners and info.dtype in ("U8", "I8") and key.split(".")[-1] == "weight":
            stored = describe(info.shape, info.dtype)
            findings.append(f"{key}: {stored} without {_SCALES} and {STATE}*")
    return matrices, findings


def _owners(checkpoint: Tensors) -> dict[str, list[str]]:
    """Return the keys of packed matrices, each with the suffixes of the keys that belong to it."""
    owners: dict[str, list[str]] = {}
    for key in checkpoint:
        owner, dot, rest = key.partition(STATE)
        suffix = dot + rest
        if not dot:
            suffix = next((side for side in _SIDES if key.endswith(side)), "")
            owner = key.removesuffix(suffix) if suffix else ""
        if owner:
            owners.setdefault(owner, []).append(suffix)
    return owners


def _packed(checkpoint: Tensors, key: str, sides: list[str]) -> Packed:
    """Return the packing of a matrix. Raises ValueError: a part is absent or does not fit."""
    tensors = checkpoint
    names = [suffix for suffix in sides if suffix.startswith(STATE)]
    if len(names) != 1 or names[0] not in _STATES:
        raise ValueError(f"{STATE}* is {names or 'absent'}, one of {[*_STATES]} is known")
    if tensors[key + names[0]].nbytes > _MAX_STATE:
        raise ValueError(f"{names[0]} has {tensors[key + names[0]].nbytes} bytes")
    state = json.loads(_read(checkpoint, key + names[0]).tobytes())
    packing = _packing(state, _STATES[names[0]])
    count, nested = math.prod(packing["shape"]), packing["nested"]
    blocks = -(-count // packing["blocksize"])
    needed = {"": -(-count // 2), _SCALES: 4 * blocks, _TABLE: 4 * 16}
    if nested is not None:
        needed[_SCALES] = blocks
        needed |= {_NESTED_SCALES: 4 * -(-blocks // nested["blocksize"]), _NESTED_TABLE: 4 * 256}
    have = {side: tensors[key + side].nbytes for side in ("", *_SIDES) if key + side in tensors}
    if have != needed:
        raise ValueError(f"its parts have {have} bytes, {needed} are needed")
    levels = _read(checkpoint, key + _TABLE).view("<f4")
    if not np.allclose(levels, LEVELS[packing["type"]], rtol=0, atol=_CLOSE):
        raise ValueError(f"{_TABLE} does not hold the values of {packing['type']}")
    parts = ["", _SCALES, *([] if nested is None else [_NESTED_SCALES, _NESTED_TABLE])]
    packing["parts"] = [[part, needed[part]] for part in parts]
    return Packed(packing, [key + side for side in sides])


def _packing(state: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a matrix's JSON. Raises ValueError: it cannot be decoded."""

    def field(name: str, is_good: bool) -> Any:
        if not is_good:
            raise ValueError(f"quant_state: {name} {state.get(name)!r:.100} is not supported")
        return state[name]

    if not isinstance(state, dict):
        raise ValueError("quant_state is no JSON object")
    shape, dtype, sizes = state.get("shape"), state.get("dtype"), {*BLOCKSIZES}
    nested = None
    if "nested_blocksize" in state:
        offset, size = state.get("nested_offset"), state["nested_blocksize"]
        field("nested_dtype", state.get("nested_dtype") == "float32")
        nested = {
            "blocksize": field("nested_blocksize", type(size) is int and size in sizes),
            "offset": field("nested_offset", type(offset) is float and math.isfinite(offset)),
        }
    size = state.get("blocksize")
    is_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    return {
        "type": field("quant_type", state.get("quant_type") == kind),
        "blocksize": field("blocksize", type(size) is int and size in sizes),
        "dtype": field("dtype", isinstance(dtype, str) and dtype in DTYPE_NAMES),
        "shape": field("shape", is_shape and bool(shape)),
        "nested": nested,
    }


def _read(checkpoint: Tensors, key: str) -> NDArray[np.uint8]:
    with Reader(checkpoint[key].extents) as reader:
        return reader.read()


def decode(packing: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Decode a matrix, from the bytes of its parts by suffix, to the bytes of its dtype."""
    scales, nested = parts[_SCALES], packing["nested"]
    if nested is None:
        scales = scales.view(np.float32)
    else:
        table, peaks = parts[_NESTED_TABLE], parts[_NESTED_SCALES].view(np.float32)
        scales = table.view(np.float32)[scales]
        scales *= np.repeat(peaks, nested["blocksize"])[: scales.size]
        scales += np.float32(nested["offset"])
    count, dtype = math.prod(packing["shape"]), DTYPE_NAMES[packing["dtype"]]
    kind, blocksize = packing["type"], packing["blocksize"]
    return unpack(parts[""], scales, count, dtype, kind=kind, blocksize=blocksize)


def unpack(
    packed: NDArray[np.uint8],
    scales: NDArray[np.float32],
    count: int,
    dtype: str,
    *,
    kind: str,
    blocksize: int,
) -> NDArray[np.uint8]:
    """Decode 4-bit values: level times the scale of the block, one fp32 product and one rounding.

    `packed` has two elements per byte, the first in the high half, `scales` one number per block of
    the flattened matrix. Returns the bytes of `count` elements of `dtype` (safetensors name).
    """
    byte, levels = np.arange(256), np.array(LEVELS[kind], np.float32)
    # A table of 256 words: the two fp32 values that each byte encodes.
    pairs = np.stack([levels[byte >> 4], levels[byte & 15]], axis=1).view(np.uint64).reshape(256)
    item = ITEM_BITS[dtype] // 8
    out: NDArray[np.uint8] = np.empty(count * item, np.uint8)
    for first in range(0, count, _STEP):
        end = min(first + _STEP, count)
        values = pairs[packed[first // 2 : -(-end // 2)]].view(np.float32)[: end - first]
        whole = values.size // blocksize * blocksize
        of_step = scales[first // blocksize : -(-end // blocksize)]
        values[:whole].reshape(-1, blocksize)[...] *= of_step[: whole // blocksize, None]
        values[whole:] *= of_step[-1]
        cast(values.view(np.uint8), "F32", dtype, out[first * item : end * item])
    return out
