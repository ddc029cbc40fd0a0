"""Kernels as they are compiled for this CPU, and for older ones."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tasks.compiled import compiled, cpu_flags
from tasks.serving import native

OLDER = {
    "with bf16 products": ("avx512_bf16", ()),
    "with AVX-512": ("avx512bw", ("-mno-avx512bf16",)),
    "with AVX2": ("avx2", ("-mno-avx512f",)),
}
"""What a CPU has to have for it, and flags that make do without more."""


def kernel_for(older: str, source: str) -> ctypes.CDLL:
    """The kernel of a file in C; skips the test where this CPU cannot do what it needs."""
    needs, flags = OLDER[older]
    if needs not in cpu_flags():
        pytest.skip(f"this CPU has no {needs}")
    found = compiled([Path(native.__path__[0]) / source], "-fopenmp", *flags, slower="")
    assert found is not None
    return found
