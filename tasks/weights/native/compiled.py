"""Compile C kernels on first use for the CPU at hand, and cache the shared library.

Nothing requires them: without a compiler callers use slower implementations.
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

LOG = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-fno-strict-aliasing", "-Wno-psabi")
PROJECT = Path(__file__).resolve().parents[3]
_COMPILE_S = 120.0


def compiled(sources: Sequence[Path], *more_flags: str, slower: str) -> ctypes.CDLL | None:
    """Return the kernels as a library, or None (and log it) if they cannot be compiled.

    Args:
        sources: C files; their headers lie beside them.
        more_flags: compiler flags, added to `FLAGS`.
        slower: what happens without the kernels, for the log.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        LOG.info("no C compiler: %s", slower)
        return None
    try:
        return ctypes.CDLL(str(_library([compiler, *FLAGS, *more_flags], sources)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        LOG.warning("kernels cannot be compiled (%s): %s", slower, reason)
        return None


def _library(compiler: Sequence[str], sources: Sequence[Path]) -> Path:
    about = (*compiler, platform.machine(), *sorted(cpu_flags()))
    digest = hashlib.sha256(repr(about).encode())
    beside = {header for source in sources for header in source.parent.glob("*.h")}
    for source in (*sources, *sorted(beside)):
        digest.update(source.read_bytes())
    path = _folder() / f"{digest.hexdigest()[:24]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        for source, made in zip(sources, objects, strict=True):
            _run([*compiler, "-fPIC", "-c", "-o", str(made), str(source)])
        fresh = Path(folder) / path.name
        _run([compiler[0], "-shared", "-o", str(fresh), *map(str, objects)])
        fresh.rename(path)  # atomic: two processes may compile at the same time
    return path


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)


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
