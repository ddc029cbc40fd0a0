"""Build of DeepSpeed's CPUAdam before the ranks start: `python -m tasks.training.engine.ops`.

Otherwise every rank builds it at first use. torch serialises these builds by a file `lock` in the
build folder; a build that is killed leaves the file behind, and every later run waits for it for
ever, silently. Here one process builds at a time, under a lock that the kernel releases when the
process ends, and removes a `lock` that no process has open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.core.events import say

LOOKS = 3
LOOK_S = 1.0
"""A `lock` has to be closed in three looks: torch closes the file a moment before it removes it."""


def build_cpu_adam() -> Path:
    """Build DeepSpeed's CPUAdam if necessary, and return the folder of the library.

    Takes about two minutes the first time, seconds later.

    Raises:
        RuntimeError: the build fails; torch raises it with the compiler's output.
    """
    import torch
    from torch.utils.cpp_extension import _get_build_directory

    if not torch.cuda.is_available():  # as in the ranks, which need the same build
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = Path(_get_build_directory(CPUAdamBuilder.NAME, verbose=False))
    with _alone(folder.with_name(f"{folder.name}.building")):
        wait_for_others(folder / "lock")
        CPUAdamBuilder().load(verbose=False)
    return folder


def wait_for_others(lock: Path) -> None:
    """Wait while a process of this machine has torch's lock open, then remove an abandoned one.

    Builds on other machines that share the folder are not seen.

    Args:
        lock: the file `lock` in torch's build folder.
    """
    idle = 0
    while lock.exists():
        idle = 0 if is_open(lock) else idle + 1
        if idle == LOOKS:
            say(f"removing {lock}: left behind by a build that was killed")
            lock.unlink(missing_ok=True)
            return
        time.sleep(LOOK_S)


def is_open(path: Path) -> bool:
    """Return True if a process whose open files we may list has this file open."""
    with contextlib.suppress(FileNotFoundError):
        wanted = path.stat()
        return any(os.path.samestat(wanted, status) for status in _open_files())
    return False


def _open_files() -> Iterator[os.stat_result]:
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for handle in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield (process / "fd" / handle).stat()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for other builds of this project; the kernel releases the lock when a process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run's build of DeepSpeed's CPUAdam")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build CPUAdam and print its folder."""
    from tasks.process.block_unused_imports import start_lean

    start_lean()
    print(f"DeepSpeed's CPUAdam: {build_cpu_adam()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
