"""Format of a matrix packed in 4 bits, as plain data.

bitsandbytes stores a matrix X of n elements in blocks of `blocksize` as

    X                                 ceil(n / 2) bytes, two elements each
    X.absmax                          one scale per block: F32, or U8 if scales are packed too
    X.quant_map                       the 16 values that 4 bits encode, F32
    X.quant_state.bitsandbytes__nf4   JSON: type, block size, dtype, shape
    X.nested_absmax, X.nested_quant_map   scales of packed scales, and the 256 values of 8 bits

NF4 and packed scales (double quantization): QLoRA, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STORED = "stored"
"""Key of `Op.quantization` under which a plan describes how the source is packed."""
STATE = ".quant_state."
STATES = {f"{STATE}bitsandbytes__{kind}": kind for kind in ("nf4", "fp4")}
"""Type of the quantization by suffix of the JSON's key."""
SCALES, TABLE = ".absmax", ".quant_map"
NESTED_SCALES, NESTED_TABLE = ".nested_absmax", ".nested_quant_map"
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


@dataclass(frozen=True)
class Nested:
    """Packing of the scales: blocks of `blocksize` scales; `offset` is added to all of them."""

    blocksize: int
    offset: float


@dataclass(frozen=True)
class Packed:
    """Packing of one matrix.

    Attributes:
        key: key of the matrix.
        type: "nf4" or "fp4".
        blocksize: elements that share a scale.
        dtype: dtype of the decoded matrix (torch name).
        shape: shape of the decoded matrix, as it was packed.
        nested: packing of the scales; None if they are F32.
        parts: suffix and size in bytes of the tensors to read, in order: the matrix, its scales,
            their scales and their table.
        sides: keys of all tensors that belong to the matrix.
    """

    key: str
    type: str
    blocksize: int
    dtype: str
    shape: tuple[int, ...]
    nested: Nested | None
    parts: tuple[tuple[str, int], ...]
    sides: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what `decode.py` needs, as plain JSON."""
        fields = {k: v for k, v in asdict(self).items() if k not in ("key", "sides")}
        return {**fields, "shape": list(self.shape), "parts": [list(part) for part in self.parts]}
