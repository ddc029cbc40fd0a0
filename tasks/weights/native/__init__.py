"""A C kernel, compiled on first use for the CPU at hand, and called on numpy arrays.

`fold.c` adds a LoRA product to bf16 rows; where BLAS sums in order, torch gives the same bytes.
Nothing requires it: without a compiler torch does its work. The shared library is cached.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOG = logging.getLogger(__name__)
# No fused multiply-add: product, scale and sum are rounded one by one, as in torch.
FLAGS = ("-O3", "-march=native", "-fno-strict-aliasing", "-Wno-psabi", "-ffp-contract=off")
PROJECT = Path(__file__).resolve().parents[3]
_COMPILE_S = 120.0
_SLOWER = "merging LoRA is slower"
MAX_RANK = 384
"""Largest rank that `fold` supports; the same number is in `fold.c`. Up to this rank MKL sums in
order on Intel CPUs, as the kernel does (measured for ranks 1 to 1024; on AMD CPUs up to 192)."""


class Folded(ctypes.Structure):
    """Counts and sums of a block: for the update D of the base W, the output Q, and W + D rounded
    to nearest N, they are <D, D>, <Q - W, D> and <N - W, D>.
    """

    _fields_ = (
        ("changed", ctypes.c_int64),
        ("nonfinite", ctypes.c_int64),
        ("update", ctypes.c_double),
        ("kept", ctypes.c_double),
        ("nearest", ctypes.c_double),
    )


class Library:
    """Compiled kernels. Calls release the interpreter's lock."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._library = kernels
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._declare("round_bf16", None, address, address, size)
        self._declare("widen_bf16", None, address, address, size)
        folded = [address] * 5 + [ctypes.c_int] + [size] * 3 + [ctypes.c_float, address]
        self._declare("fold_bf16", ctypes.c_int, *folded)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments

    def fold(
        self,
        base: NDArray[np.uint16],
        out: NDArray[np.uint16],
        *,
        a: NDArray[Any],
        b: NDArray[np.float32],
        scale: float,
        keys: NDArray[np.uint64] | None = None,
    ) -> Folded:
        """Compute `out = bf16(base + scale * (b @ a))`.

        Args:
            base: rows of a bf16 matrix as 16-bit words, shape (rows, columns).
            a: shape (rank, columns), contiguous, in fp32 or as 16-bit words of bf16; rank at most
                `MAX_RANK`.
            b: shape (rows, rank).
            keys: `rounding.row_keys` of the rows, to round without bias; None rounds to nearest.
        """
        folded = Folded()
        sizes = (base.shape[0], base.shape[1], b.shape[1])
        matrices = (_at(base), _at(out), _at(b), _at(a), None if keys is None else _at(keys))
        kinds = (int(a.dtype.itemsize == 2), *sizes, scale, ctypes.addressof(folded))
        if not self._library.fold_bf16(*matrices, *kinds):
            raise ValueError(f"the kernel does not support rank {b.shape[1]} on this CPU")
        return folded

    def round_bf16(self, wide: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        """Round fp32 to the 16 bits of bf16: to nearest, ties to even; NaN becomes 0x7FC0."""
        self._library.round_bf16(_at(wide), _at(out), wide.size)

    def widen_bf16(self, narrow: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        """Convert the 16 bits of bf16 to fp32, exactly."""
        self._library.widen_bf16(_at(narrow), _at(out), narrow.size)

    @property
    def folds(self) -> bool:
        """True if `fold` supports this CPU."""
        nothing: NDArray[np.uint64] = np.zeros(64, np.uint64)
        where = [_at(nothing)] * 5
        return bool(self._library.fold_bf16(*where, 0, 0, 0, 0, 0.0, _at(nothing)))


def _at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@cache
def library() -> Library | None:
    """Return the kernels; None if they cannot be compiled, which is logged."""
    kernels = compiled(Path(__file__).with_name("fold.c"))
    return None if kernels is None else Library(kernels)


def compiled(source: Path) -> ctypes.CDLL | None:
    """Return a C file as a loaded library, or None (and log it) if it cannot be compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        LOG.info("no C compiler: %s", _SLOWER)
        return None
    try:
        return ctypes.CDLL(str(_shared_object([compiler, *FLAGS, "-fPIC", "-shared"], source)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        LOG.warning("kernels cannot be compiled (%s): %s", _SLOWER, reason)
        return None


def _shared_object(compiler: list[str], source: Path) -> Path:
    about = (*compiler, platform.machine(), *sorted(cpu_flags()))
    digest = hashlib.sha256(repr(about).encode() + source.read_bytes())
    path = _folder() / f"{digest.hexdigest()[:24]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        command = [*compiler, "-o", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        fresh.rename(path)  # atomic: two processes may compile at the same time
    return path


def _folder() -> Path:
    """Return the project's cache folder, or the user's if the package is installed alone."""
    if (PROJECT / "pyproject.toml").exists() and os.access(PROJECT, os.W_OK):
        return PROJECT / ".cache" / "native"
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "plumbline" / "native"


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags as Linux names them; empty if it does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = (line.partition(":") for line in lines)
    named = [value for key, _, value in words if key.strip() in ("flags", "Features")]
    return frozenset(named[0].split()) if named else frozenset()
