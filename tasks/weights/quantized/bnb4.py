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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import describe
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, cast
from tasks.weights.files.reader import Checkpoint
from tasks.weights.files.source import Reader

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


@dataclass(frozen=True)
class Nested:
    """Packing of the scales: blocks of `blocksize` scales; `offset` is added to all of them."""

    blocksize: int
    offset: float


@dataclass(frozen=True)
class Packed:
    """Packing of one matrix.

    Attributes:
        type: "nf4" or "fp4".
        dtype, shape: of the decoded matrix; torch name.
        parts: suffix and size in bytes of the tensors to read, in order: the matrix, its scales,
            their scales and their table.
        sides: keys of all tensors that belong to the matrix.
    """

    type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested: Nested | None
    parts: tuple[tuple[str, int], ...]
    sides: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what `decode` needs, as plain JSON."""
        fields = {k: v for k, v in asdict(self).items() if k != "sides"}
        return {**fields, "shape": list(self.shape), "parts": [list(part) for part in self.parts]}


def read_states(checkpoint: Checkpoint) -> tuple[dict[str, Packed], list[str]]:
    """Find the packed matrices of a checkpoint; reads headers, their JSON and their 16 values.

    Returns the packing by key, and one line for everything that is wrong with any of them.
    """
    matrices: dict[str, Packed] = {}
    findings: list[str] = []
    owners = _owners(checkpoint)
    for key, sides in owners.items():
        state, faults = _state(checkpoint, sides)
        if key not in checkpoint.tensors:
            faults.append(f"absent, though {', '.join(sorted(sides))} are there")
        faults = faults or list(_state_faults(state))
        faults = faults or list(_size_faults(checkpoint, key, sides, state))
        if faults:
            findings += [f"{key}: {text}" for text in faults]
        else:
            matrices[key] = _packed(checkpoint, key, sides, state)
    for key, info in checkpoint.tensors.items():
        if key not in owners and info.dtype in ("U8", "I8") and key.split(".")[-1] == "weight":
            stored = describe(info.shape, info.dtype)
            findings.append(f"{key}: {stored} without {_SCALES} and {STATE}*")
    return matrices, findings


def _owners(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Return the keys of packed matrices, each with the keys that belong to it, by suffix."""
    owners: dict[str, dict[str, str]] = {}
    for key in checkpoint.tensors:
        owner, dot, rest = key.partition(STATE)
        suffix = dot + rest
        if not dot:
            suffix = next((side for side in _SIDES if key.endswith(side)), "")
            owner = key.removesuffix(suffix) if suffix else ""
        if owner:
            owners.setdefault(owner, {})[suffix] = key
    return owners


def _state(checkpoint: Checkpoint, sides: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the parsed JSON of a matrix, and what is wrong with it."""
    names = [suffix for suffix in sides if suffix.startswith(STATE)]
    if len(names) != 1 or names[0] not in _STATES:
        what = ", ".join(name.removeprefix(STATE) for name in names) or "none"
        known = ", ".join(name.removeprefix(STATE) for name in _STATES)
        return {}, [f"{STATE[1:]}* is {what}; one of {known} is known"]
    kind, key = _STATES[names[0]], sides[names[0]]
    info = checkpoint.tensors[key]
    try:
        if info.dtype != "U8" or info.nbytes > _MAX_STATE:
            raise ValueError(describe(info.shape, info.dtype))
        state = json.loads(_read(checkpoint, key).tobytes().decode())
        if not isinstance(state, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        return {}, [f"{names[0][1:]} is not readable: {error}"]
    written = state.get("quant_type")
    return state, [] if written == kind else [f"{names[0][1:]} says quant_type {written!r}"]


def _state_faults(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of the JSON that cannot be decoded."""
    shape = state.get("shape")
    if not isinstance(shape, list) or not shape or not all(_is_count(n) for n in shape):
        yield f"shape {shape!r} is not a list of positive sizes"
    for name in ("blocksize", "nested_blocksize"):
        size = state.get(name)
        if (name == "blocksize" or name in state) and not (_is_count(size) and size in BLOCKSIZES):
            yield f"{name} {size!r} is not one of {', '.join(map(str, BLOCKSIZES))}"
    dtype = state.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_NAMES:
        yield f"dtype {dtype!r} is not one of {', '.join(DTYPE_NAMES)}"
    if "nested_blocksize" not in state:
        return
    if state.get("nested_dtype") != "float32":
        yield f"nested_dtype {state.get('nested_dtype')!r}, only float32 is supported"
    offset = state.get("nested_offset")
    if not isinstance(offset, float) or not math.isfinite(offset):
        yield f"nested_offset {offset!r} is not a finite number"


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _size_faults(
    checkpoint: Checkpoint, key: str, sides: Mapping[str, str], state: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the parts of a matrix that are absent or that its JSON does not fit."""
    count, nested = math.prod(state["shape"]), state.get("nested_blocksize")
    packed, blocks = checkpoint.tensors[key].nbytes, -(-count // state["blocksize"])
    if packed != -(-count // 2):
        yield f"packed numbers of {packed} bytes, the shape needs {-(-count // 2)}"
    needed = {_SCALES: ("U8" if nested else "F32", blocks), _TABLE: ("F32", 16)}
    if nested:
        needed |= {_NESTED_SCALES: ("F32", -(-blocks // nested)), _NESTED_TABLE: ("F32", 256)}
    for suffix in _SIDES:
        info = checkpoint.tensors.get(key + suffix)
        if suffix not in needed:
            if suffix in sides:
                yield f"{suffix[1:]} without nested_blocksize"
        elif info is None:
            yield f"{suffix[1:]} absent"
        elif (info.dtype, math.prod(info.shape)) != needed[suffix]:
            dtype, size = needed[suffix]
            yield f"{suffix[1:]} is {describe(info.shape, info.dtype)}, {dtype} [{size}] is needed"
        elif suffix == _TABLE:
            levels = _read(checkpoint, key + _TABLE).view("<f4")
            if not np.allclose(levels, LEVELS[state["quant_type"]], rtol=0, atol=_CLOSE):
                yield f"quant_map does not hold the values of {state['quant_type']}"


def _packed(
    checkpoint: Checkpoint, key: str, sides: Mapping[str, str], state: Mapping[str, Any]
) -> Packed:
    nested = None
    if "nested_blocksize" in state:
        nested = Nested(state["nested_blocksize"], state["nested_offset"])
    parts = ("", _SCALES, *((_NESTED_SCALES, _NESTED_TABLE) if nested else ()))
    return Packed(
        type=state["quant_type"],
        blocksize=state["blocksize"],
        dtype=state["dtype"],
        shape=tuple(state["shape"]),
        nested=nested,
        parts=tuple((part, checkpoint.tensors[key + part].nbytes) for part in parts),
        sides=tuple(sides.values()),
    )


def _read(checkpoint: Checkpoint, key: str) -> NDArray[np.uint8]:
    with Reader(checkpoint.extents(key)) as reader:
        return reader.read()


def decode(stored: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Decode a matrix to the bytes of its dtype.

    Args:
        stored: `Packed.as_json`.
        parts: bytes of the matrix and of its scales, by suffix.
    """
    scales, nested = parts[_SCALES], stored["nested"]
    if nested is None:
        scales = scales.view(np.float32)
    else:
        table, peaks = parts[_NESTED_TABLE], parts[_NESTED_SCALES].view(np.float32)
        scales = table.view(np.float32)[scales]
        scales *= np.repeat(peaks, nested["blocksize"])[: scales.size]
        scales += np.float32(nested["offset"])
    return unpack(
        parts[""],
        scales,
        math.prod(stored["shape"]),
        DTYPE_NAMES[stored["dtype"]],
        kind=stored["type"],
        blocksize=stored["blocksize"],
    )


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

    Args:
        packed: two elements per byte, the first in the high half.
        scales: one per block of the flattened matrix.
        count: number of elements.
        dtype: dtype of the result (safetensors name).
        kind: "nf4" or "fp4".
        blocksize: elements per block; divides `_STEP`.

    Returns:
        the bytes of the elements.
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
