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
        size, address = ctypes.c_size_t, ctypes.c_void_p
        self._round, self._widen, self._fold = (
            kernels.round_bf16, kernels.widen_bf16, kernels.fold_bf16
        )  # fmt: skip
        for cast in (self._round, self._widen):
            cast.restype, cast.argtypes = None, [address, address, size]
        folded: list[Any] = [address] * 5 + [ctypes.c_int] + [size] * 3 + [ctypes.c_float, address]
        self._fold.restype, self._fold.argtypes = ctypes.c_int, folded

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
        folded, (rows, columns), rank = Folded(), base.shape, b.shape[1]
        if (*out.shape, *a.shape, len(b)) != (rows, columns, rank, columns, rows):
            raise ValueError(f"{b.shape} times {a.shape} is not {base.shape}, or not {out.shape}")
        matrices = (_at(base), _at(out), _at(b), _at(a), None if keys is None else _at(keys))
        kinds = (int(a.dtype.itemsize == 2), rows, columns, rank, scale, ctypes.addressof(folded))
        if not self._fold(*matrices, *kinds):
            raise ValueError(f"the kernel does not support rank {rank} on this CPU")
        return folded

    def round_bf16(self, wide: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        """Round fp32 to the 16 bits of bf16: to nearest, ties to even; NaN becomes 0x7FC0."""
        self._round(_at(wide), _at(out), wide.size)

    def widen_bf16(self, narrow: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        """Convert the 16 bits of bf16 to fp32, exactly."""
        self._widen(_at(narrow), _at(out), narrow.size)

    @property
    def folds(self) -> bool:
        """True if `fold` supports this CPU."""
        nothing: NDArray[np.uint64] = np.zeros(64, np.uint64)
        where = [_at(nothing)] * 5
        return bool(self._fold(*where, 0, 0, 0, 0, 0.0, _at(nothing)))


def _at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@cache
def library() -> Library | None:
    """Return the kernels; None if they cannot be compiled, which is logged."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        LOG.info("no C compiler: %s", _SLOWER)
        return None
    try:
        return Library(ctypes.CDLL(str(_compiled([compiler, *FLAGS, "-fPIC", "-shared"]))))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        LOG.warning("kernels cannot be compiled (%s): %s", _SLOWER, reason)
        return None


def _compiled(command: list[str]) -> Path:
    """Return the shared library of `fold.c` for this CPU, from the cache or compiled."""
    source, info = Path(__file__).with_name("fold.c"), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else ()
    cpu = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    about = repr((command, platform.machine(), cpu)).encode()
    folder = PROJECT / ".cache" / "native"
    if not (PROJECT / "pyproject.toml").exists() or not os.access(PROJECT, os.W_OK):
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(user) / "plumbline" / "native"  # the package is installed alone
    digest = hashlib.sha256(about + source.read_bytes()).hexdigest()
    path = folder / f"{digest[:24]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            fresh = Path(work) / path.name
            command = [*command, "-o", str(fresh), str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
            fresh.rename(path)  # atomic: two processes may compile at the same time
    return path
