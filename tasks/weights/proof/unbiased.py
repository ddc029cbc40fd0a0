"""Unbiased rounding with numpy in fp64, for the proof: `tasks/weights/rounding.py` defines it.

It shares no arithmetic with the code that merges, so that a wrong source of random bits is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.files.dtypes import rounded
from tasks.weights.rounding import GRIDS, TWO_STEPS, row_keys

_LARGEST = {"BF16": 2.0**128, "F16": 2.0**16}
"""From here on a magnitude is infinite, by dtype."""


def random_parts(name: str, first: int, rows: int, columns: int) -> NDArray[np.float64]:
    """Return `r / 65536` of rows `[first, first + rows)` of a tensor, shape (rows, columns)."""
    keys = row_keys(name, first, rows)[:, None]
    column: NDArray[np.uint64] = np.arange(columns, dtype=np.uint64)[None, :]
    word = np.uint64(0xFFFFFFFF)
    x = ((column >> np.uint64(1)) + (keys & word)) & word
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x21F0AAAD)) & word
    x ^= x >> np.uint64(15)
    x = ((x ^ (keys >> np.uint64(32))) * np.uint64(0xD35A2D97)) & word
    x ^= x >> np.uint64(15)
    halves = np.where(column & np.uint64(1), x >> np.uint64(16), x & np.uint64(0xFFFF))
    parts: NDArray[np.float64] = halves.astype(np.float64) / 65536
    return parts


def round_with(values: NDArray[Any], parts: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Round to a 16-bit dtype by random parts of a step; monotone in `values`.

    Args:
        values: any shape; rounded to fp32 first, as a merge does.
        parts: `random_parts` of the elements.
        dtype: "BF16" or "F16".
    """
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype(np.float32)
        step = _step(wide, dtype)
        result = np.floor(np.abs(wide) / step + parts) * step
        near = rounded(wide, dtype).astype(np.float64)
    exact: NDArray[np.float64] = np.where(result < _LARGEST[dtype], np.copysign(result, wide), near)
    return exact


def small(update: NDArray[Any], base: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Return True for updates that are rounded without bias: below two steps of the base."""
    below: NDArray[np.bool_] = np.abs(update) < TWO_STEPS * _step(base, dtype)
    return below


def _step(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Return the distance of neighbouring numbers of a dtype at these magnitudes."""
    mantissa, least = GRIDS[dtype]
    number, exponent = np.frexp(values.astype(np.float64))
    power = np.where(number == 0, least, np.maximum(exponent - 1, least))
    step: NDArray[np.float64] = np.ldexp(1.0, power - mantissa)
    return step
