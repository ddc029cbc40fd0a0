"""Round trained weights to 16 bits without losing the update.

A base's weights lie on the grid of its format. Rounding `base + update` to nearest returns the base
wherever the update is below half a step: a light adapter loses most of what it learned. Here an
element whose update is below two steps of the base's weight is rounded up with the probability of
its remainder, so the update is kept on average; a larger one is rounded to nearest. An element that
is on the grid stays as it is.

Algorithm (version 1). Random bits depend on the tensor's name and the element's place alone, so the
bytes do not depend on threads, files or resumed runs. For an element (row, column) of a tensor,
leading axes flattened:

    K  = first 8 bytes of blake2b(f"{VERSION}:{SEED}:{name}"), little-endian
    k  = splitmix64(K + row * 0x9E3779B97F4A7C15), modulo 2**64
    x  = column // 2 + low32(k);  x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15
    x ^= high32(k);  x *= 0xD35A2D97;  x ^= x >> 15                             modulo 2**32
    r  = the low 16 bits of x for an even column, the high 16 bits for an odd one

The magnitude of the fp32 sum is rounded up if its remainder, as a part of a step, is at least
1 - r / 65536. A number that would become infinite is rounded to nearest. `native/fold.c` and
`expected.py` are independent implementations.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

VERSION, SEED = 1, 0
Rounding = Literal["unbiased", "nearest"]
GRIDS = {"BF16": (7, -126), "F16": (10, -14)}
"""Mantissa bits and exponent of the smallest normal number, by dtype (safetensors name)."""
TWO_STEPS = 2
"""Updates from this many steps of the base's weight on are rounded to nearest."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97
_EXPONENT = 0x7F800000


def described(rounding: Rounding) -> dict[str, Any]:
    """Return the rounding as a manifest names it."""
    if rounding == "nearest":
        return {"rounding": "nearest"}
    return {"rounding": "unbiased", "seed": SEED, "version": VERSION}


def row_keys(name: str, first: int, count: int) -> NDArray[np.uint64]:
    """Return the keys `k` of rows `[first, first + count)` of a tensor, shape (count,)."""
    digest = blake2b(f"{VERSION}:{SEED}:{name}".encode(), digest_size=8).digest()
    start = (int.from_bytes(digest, "little") + first * _GOLDEN) & _MASK
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return keys


def unbiased(
    wide: torch.Tensor, base: torch.Tensor | None, dtype: torch.dtype, keys: NDArray[np.uint64]
) -> torch.Tensor:
    """Round fp32 to a 16-bit dtype without bias; the result is on the device of `wide`.

    Args:
        wide: sums of base and update, fp32, shape (rows, columns).
        base: the base's values, fp32, same shape; None rounds every element without bias.
        dtype: torch.bfloat16 or torch.float16.
        keys: `row_keys` of the rows.
    """
    import torch

    near = wide.to(dtype)
    mantissa, least = GRIDS["BF16" if dtype == torch.bfloat16 else "F16"]
    step = _step(wide, mantissa, least)
    parts = wide.abs() / step
    lower = parts.floor()
    above = parts.sub_(lower) >= 1 - _random(keys, wide.shape[1], wide.device) / 65536
    result = (lower + above).mul_(step).copysign_(wide).to(dtype)
    chosen = result.isfinite()
    if base is not None:
        chosen &= (wide - base).abs() < TWO_STEPS * _step(base, mantissa, least)
    return torch.where(chosen, result, near)


def _step(values: torch.Tensor, mantissa: int, least: int) -> torch.Tensor:
    """Return the distance of neighbouring numbers of a format at fp32 magnitudes."""
    import torch

    powers = (values.contiguous().view(torch.int32) & _EXPONENT).view(torch.float32)
    return powers.clamp_(min=2.0**least).mul_(2.0**-mantissa)


def _random(keys: NDArray[np.uint64], columns: int, device: torch.device) -> torch.Tensor:
    """Return the random 16 bits of every element as fp32, shape (rows, columns)."""
    import torch

    words = torch.from_numpy(keys.view(np.int32).reshape(-1, 2)).to(device)  # low half first
    x = torch.arange((columns + 1) // 2, dtype=torch.int32, device=device) + words[:, :1]
    x = (x ^ _shifted(x, 16)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 15) ^ words[:, 1:]) * _signed(_SECOND)
    x = x ^ _shifted(x, 15)
    pairs = torch.stack([x & 0xFFFF, _shifted(x, 16)], dim=-1)
    return pairs.reshape(len(keys), -1)[:, :columns].float()


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift 32-bit words right; torch's own shift repeats the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
