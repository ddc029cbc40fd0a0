"""Formats of packed matrices: bitsandbytes' 4 bits, and 8-bit floats with scales. Without torch.

bitsandbytes stores a matrix X of n elements in blocks of `blocksize` as

    X                                 ceil(n / 2) bytes, two elements each
    X.absmax                          one scale per block: F32, or U8 if scales are packed too
    X.quant_map                       the 16 values that 4 bits encode, F32
    X.quant_state.bitsandbytes__nf4   JSON: type, block size, dtype, shape
    X.nested_absmax, X.nested_quant_map   scales of packed scales, and the 256 values of 8 bits

NF4 and packed scales (double quantization): QLoRA, https://arxiv.org/abs/2305.14314. The decoded
bits are those of bitsandbytes, but its library is not called: up to 0.50.2 its AVX-512 kernel uses
wrong scales if a row is not a whole number of blocks (SigLIP has 4304 columns; the CUDA kernels are
right), and other cases go through `torch.compile`, which takes seconds per shape.

DeepSeek-V3, compressed-tensors and ModelOpt store X as float8_e4m3fn, and beside it `X_scale_inv`
or `X_scale`, by which it is multiplied: one number, one per row, or one per block of the matrix,
whose last blocks may be partial. Scales of activations are not part of the weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import describe
from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, NUMPY, cast, widened
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.tensors import Extent, Reader, Tensor, Tensors, read_all
from tasks.weights.pickled.torch_file import is_pickled_model, read_model
from tasks.weights.quantized.config_fields import (
    fp8_blocks,
    is_fp8,
    is_packed,
    refusal,
    remedy,
    stored,
)

_SHOWN = 50
STATE = ".quant_state."
_SCALES, _TABLE = ".absmax", ".quant_map"
_NESTED_SCALES, _NESTED_TABLE = ".nested_absmax", ".nested_quant_map"
_SIDES = (_SCALES, _TABLE, _NESTED_SCALES, _NESTED_TABLE)
_SIDE = re.compile(r"(.+)(\.(?:nested_)?(?:absmax|quant_map)|\.quant_state\..*)")
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
FP8, DTYPE = "fp8", "F8_E4M3"
_EXPONENTS = "F8_E8M0"
_FP8_SCALES = "_scale_inv", "_scale"
_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
_GPT2 = ("c_attn", "q_attn", "c_proj", "c_fc")
CONV1D = {"gpt2": _GPT2, "openai-gpt": _GPT2, "imagegpt": _GPT2, "decision_transformer": _GPT2}
"""Linear layers by family that are stored as (in, out); transformers packs their transpose."""


class Decoded(NamedTuple):
    """The quantized matrices of a checkpoint, as they look decoded."""

    tensors: dict[str, Tensor]
    sides: set[str]  # keys of scales and tables, which belong to a matrix
    findings: list[str]  # one line for every matrix that cannot be decoded

    def add(self, whole: Tensors, key: str, packing: dict[str, Any], sides: Sequence[str]) -> None:
        """Add a matrix, with the suffixes of the tensors that belong to it.

        `packing` is plain JSON (`Op.packed`): `type`, `shape` and `dtype` (torch name) of the
        decoded matrix, suffix and size in bytes of the `parts` to read, in order, and fields of its
        format.
        """
        # Tables of values and JSON come last: they are not decoded, but belong to the matrix.
        parts = dict.fromkeys([*(suffix for suffix, _ in packing["parts"]), *sides])
        extents = tuple(extent for suffix in parts for extent in whole[key + suffix].extents)
        shape = tuple(packing["shape"])
        shape = shape[::-1] if packing["turned"] else shape
        self.tensors[key] = Tensor(shape, DTYPE_NAMES[packing["dtype"]], extents, packed=packing)
        self.sides.update(key + side for side in sides)


# 4 bits


def read_states(tensors: Tensors, config: Mapping[str, Any]) -> Decoded:
    """Find the matrices in 4 bits; reads headers, their JSON and their 16 values."""
    decoded = Decoded({}, set(), [])
    if not is_packed(config):
        decoded.findings.append("config.json does not say that the weights are packed in 4 bits")
    owners: dict[str, list[str]] = {}
    for key in tensors:
        if side := _SIDE.fullmatch(key):
            owners.setdefault(side[1], []).append(side[2])
    for key, sides in owners.items():
        layers = CONV1D.get(str(config.get("model_type")), ())
        is_turned = not {*layers}.isdisjoint(key.split("."))
        try:
            packing = {**_packing_4(tensors, key, sides), "turned": is_turned}
            decoded.add(tensors, key, packing, sides)
        except (ValueError, RecursionError) as error:
            decoded.findings.append(f"{key}: {error}")
    for key, info in tensors.items():
        if key not in owners and info.dtype in ("U8", "I8") and key.split(".")[-1] == "weight":
            have = describe(info.shape, info.dtype)
            decoded.findings.append(f"{key}: {have} without {_SCALES} and {STATE}*")
    if not decoded.tensors and not decoded.findings:
        decoded.findings.append(
            f"config.json says {stored(config)}, but no tensor is packed: "
            "if these are plain weights, remove quantization_config from it"
        )
    return decoded


def _packing_4(tensors: Tensors, key: str, sides: Sequence[str]) -> dict[str, Any]:
    """Return the packing of a matrix. Raises ValueError: a part is absent or does not fit."""
    states = [suffix for suffix in sides if suffix.startswith(STATE)]
    if len(states) != 1 or tensors[key + states[0]].nbytes > _MAX_STATE:
        raise ValueError(f"{len(states)} small tensors {STATE}*, expected one")
    state: Any = json.loads(read_all(tensors[key + states[0]]).tobytes())
    if not isinstance(state, dict):
        raise ValueError("quant_state is no JSON object")
    values: Any = (state.get(name) for name in ("quant_type", "shape", "blocksize"))
    kind, shape, blocksize = values
    nested = None
    if "nested_blocksize" in state:
        nested = {"blocksize": state["nested_blocksize"], "offset": state.get("nested_offset")}
    is_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    offset = nested and nested["offset"]
    is_good = {
        "quant_type": states[0] == f"{STATE}bitsandbytes__{kind}" and kind in LEVELS,
        "blocksize": _is_size(blocksize),
        "dtype": state.get("dtype") in [*DTYPE_NAMES],
        "shape": is_shape and bool(shape),
        "nested_dtype": nested is None or state.get("nested_dtype") == "float32",
        "nested_blocksize": nested is None or _is_size(nested["blocksize"]),
        "nested_offset": nested is None or (type(offset) is float and math.isfinite(offset)),
    }
    for name, good in is_good.items():
        if not good:
            raise ValueError(f"quant_state: {name} {state.get(name)!r:.100} is not supported")
    count = prod(shape)
    blocks = -(-count // blocksize)
    needed = {"": -(-count // 2), _SCALES: 4 * blocks, _TABLE: 4 * 16}
    if nested is not None:
        needed[_SCALES] = blocks
        needed |= {_NESTED_SCALES: 4 * -(-blocks // nested["blocksize"]), _NESTED_TABLE: 4 * 256}
    have = {side: tensors[key + side].nbytes for side in ("", *_SIDES) if key + side in tensors}
    if have != needed:
        raise ValueError(f"its parts have {have} bytes, {needed} are needed")
    levels = read_all(tensors[key + _TABLE]).view("<f4")
    if not np.allclose(levels, LEVELS[kind], rtol=0, atol=_CLOSE):
        raise ValueError(f"{_TABLE} does not hold the values of {kind}")
    parts = ["", _SCALES, *([] if nested is None else [_NESTED_SCALES, _NESTED_TABLE])]
    return {
        "type": kind,
        "blocksize": blocksize,
        "dtype": state["dtype"],
        "shape": shape,
        "nested": nested,
        "parts": [[part, needed[part]] for part in parts],
    }


def _is_size(value: Any) -> bool:
    return type(value) is int and value in BLOCKSIZES


def _decode_4(
    packing: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Return the bytes of a matrix in its dtype."""
    nested = packing["nested"]
    if nested is None:
        scales = parts[_SCALES].view(np.float32)
    else:
        table, peaks = parts[_NESTED_TABLE], parts[_NESTED_SCALES].view(np.float32)
        scales = table.view(np.float32)[parts[_SCALES]]
        scales *= np.repeat(peaks, nested["blocksize"])[: scales.size]
        scales += np.float32(nested["offset"])
    count, dtype = prod(packing["shape"]), DTYPE_NAMES[packing["dtype"]]
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


# 8-bit floats


def is_activation_scale(key: str) -> bool:
    """Return True for scales of inputs, outputs and the KV cache."""
    return key.endswith(_ACTIVATIONS)


def read_scales(tensors: Tensors, config: Mapping[str, Any]) -> Decoded:
    """Find the matrices in 8 bits; reads headers only."""
    decoded = Decoded({}, set(filter(is_activation_scale, tensors)), [])
    if not is_fp8(config):
        decoded.findings.append(f"config.json does not say how weights are stored in {DTYPE}")
        return decoded
    blocks = fp8_blocks(config)
    for key, info in tensors.items():
        if ITEM_BITS[info.dtype] != 8 or info.dtype in (_EXPONENTS, "BOOL"):
            continue
        suffix = next((suffix for suffix in _FP8_SCALES if key + suffix in tensors), "")
        if info.dtype != DTYPE:
            decoded.findings.append(f"{key}: {info.dtype}, which is not decoded here")
        elif not suffix:
            decoded.findings.append(f"{key}: {info.dtype} without {' or '.join(_FP8_SCALES)}")
        elif packing := _packing_8(info, suffix, tensors[key + suffix], blocks):
            decoded.add(tensors, key, packing, [suffix])
        else:
            scale = describe(tensors[key + suffix].shape, tensors[key + suffix].dtype)
            have = describe(info.shape, info.dtype)
            decoded.findings.append(f"{key}: {have} with scales {scale}")
    if not decoded.tensors and not decoded.findings:
        text = f"config.json says {stored(config)}, but no tensor is stored in {DTYPE}"
        decoded.findings.append(text)
    return decoded


def _packing_8(
    info: Tensor, suffix: str, scale: Tensor, blocks: Sequence[tuple[int, int]]
) -> dict[str, Any] | None:
    """Return the packing of one matrix (..., out, in); None if its scales do not fit."""
    if len(info.shape) < 2 or scale.dtype not in (*NUMPY, _EXPONENTS):
        return None
    *lead, rows, columns = info.shape
    shape = tuple(scale.shape)
    if not lead:
        shape = (1, 1) if prod(shape) == 1 else (rows, 1) if shape == (rows,) else shape
    for high, wide in (*blocks, (1, columns), (rows, columns)):
        if shape == (*lead, -(-rows // high), -(-columns // wide)):
            size = prod(shape) * ITEM_BITS[scale.dtype] // 8
            return {
                "type": FP8,
                "dtype": "float32",  # so that nothing is rounded before the merge
                "shape": list(info.shape),
                "turned": False,
                "block": [high, wide],  # rows and columns that share a scale
                "scale_dtype": scale.dtype,
                "parts": [["", prod(info.shape)], [suffix, size]],
            }
    return None


def _decode_8(
    packing: Mapping[str, Any], parts: Mapping[str, NDArray[np.uint8]]
) -> NDArray[np.float32]:
    """Return number times scale, one fp32 product an element."""
    raw, scale = (parts[suffix] for suffix, _ in packing["parts"])
    (*_, rows, columns), (high, wide) = packing["shape"], packing["block"]
    values = _table()[raw].reshape(-1, rows, columns)
    if packing["scale_dtype"] == _EXPONENTS:
        scales = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
        scales[scale == 255] = np.nan
    else:
        scales = widened(scale, packing["scale_dtype"])
    scales = scales.reshape(len(values), -(-rows // high), -(-columns // wide))
    for row in range(scales.shape[1]):
        of_row = np.repeat(scales[:, row], wide, axis=-1)[:, None, :columns]
        values[:, row * high : (row + 1) * high] *= of_row
    return values.reshape(packing["shape"])


def _table() -> NDArray[np.float32]:
    """Return the values of the 256 codes: sign, 4 bits of exponent, 3 of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, 8 + mantissa, mantissa)
    values = np.ldexp(size.astype(np.float32), np.maximum(exponent, 1) - 10)
    values[code & 127 == 127] = np.nan
    return np.where(code > 127, -values, values).astype(np.float32)


def decoded(packing: Mapping[str, Any], extents: Sequence[Extent]) -> NDArray[np.float32]:
    """Decode a matrix from the ranges of its parts, one after the other, to fp32.

    The values are rounded to the dtype of the matrix.
    """
    parts: dict[str, NDArray[np.uint8]] = {}
    at = 0
    with Reader(extents) as reader:
        for suffix, size in packing["parts"]:  # each into its own memory, so that it is aligned
            parts[suffix] = reader.read(at, size)
            at += size
    if packing["type"] == FP8:
        return _decode_8(packing, parts)
    values = widened(_decode_4(packing, parts), DTYPE_NAMES[packing["dtype"]])
    matrix = values.reshape(packing["shape"])
    return np.ascontiguousarray(matrix.T) if packing["turned"] else matrix


# A folder


def open_model(root: Path) -> Tensors:
    """Open a full model, headers only: safetensors (plain or quantized) or `.bin` files."""
    return read_model(root) if is_pickled_model(root) else read_base(root)


def read_base(root: Path) -> Tensors:
    """Read the headers of a full model's folder, stored plainly, in bitsandbytes' 4 bits or in fp8.

    Packed matrices look decoded, and keys of their parts are left out. The ranges of such a matrix
    are those of its parts, one after the other, and a plan decodes them (`Op.packed`).

    Raises ArtifactError with all findings: another quantization, matrices without their parts.
    """
    path = root / "config.json"
    config = read_json(path) if path.is_file() else {}
    if refused := refusal(config):
        raise ArtifactError(f"{root}: {refused}", hint=remedy(root))
    whole = read_checkpoint(root)
    if is_fp8(config) or any(info.dtype == DTYPE for info in whole.values()):
        kind, hint = "fp8", remedy(root)
        decoded = read_scales(whole, config)
    elif is_packed(config) or any(STATE in key for key in whole):
        kind, hint = "4-bit", "save it again with save_pretrained, or give the same model in bf16"
        decoded = read_states(whole, config)
    else:
        return whole
    if decoded.findings:
        raise ArtifactError(
            f"{root}: not a usable {kind} checkpoint: {first_and_more(decoded.findings)}",
            details=decoded.findings[:_SHOWN],
            hint=hint,
        )
    plain = {key: tensor for key, tensor in whole.items() if key not in decoded.sides}
    return plain | decoded.tensors
