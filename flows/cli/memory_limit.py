"""A bound on the memory of a look at a folder that may be hostile."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import ConfigError

MAX_MEMORY = 16 << 30
"""Bytes of address space. What is read is bounded before it is read; this holds what is not."""


@contextlib.contextmanager
def bounded_memory(source: str) -> Iterator[None]:
    """Let this process take `MAX_MEMORY` more address space than it has, or what it may have.

    Children that start within inherit the bound: no CUDA, which maps more than that, belongs here.

    Args:
        source: the folder, for the error.

    Raises:
        ConfigError: more was needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [_taken() + MAX_MEMORY, soft, hard]
    limit = min(one for one in bounds if one != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError as error:
        raise ConfigError(
            f"source={source}: needs more than {limit / 2**30:.1f} GiB to be looked at",
            hint="look at what the largest .json and .bin files in it are",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _taken() -> int:
    """Bytes of address space that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
