"""What DeepSpeed compiles at first use, compiled before there are ranks: its CPUAdam.

    python -m tasks.training.engine.ops

Left to themselves all ranks build it, and torch keeps them apart by a file `lock` in the build
folder, which whoever created it removes. A build that is killed leaves the file behind, and from
then on every run with that folder waits for ever, without a word. Here one process builds at a
time, under a lock that ends with its process, and it removes a `lock` that nobody holds. The ranks
then find the library built.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOOKS = 3
LOOK_S = 1.0
"""torch closes the file a moment before it removes it, so one look proves nothing."""


def build_cpu_adam() -> Path:
    """Have the library of DeepSpeed's CPUAdam in torch's folder for extensions; that folder.

    Takes about two minutes at the first time, seconds later.

    Raises:
        RuntimeError: it does not compile; by torch, with the compiler's words.
    """
    import torch
    from torch.utils.cpp_extension import _get_build_directory

    if not torch.cuda.is_available():  # as in the ranks: it has to be the very same build
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = Path(_get_build_directory(CPUAdamBuilder.NAME, verbose=False))
    with _alone(folder.with_name(f"{folder.name}.building")):
        wait_for_others(folder / "lock")
        CPUAdamBuilder().load(verbose=False)
    return folder


def wait_for_others(lock: Path) -> None:
    """Wait while a process of this machine holds torch's lock; remove one that nobody holds.

    A build by another program on another machine that shares the folder is not seen.
    """
    idle = 0
    while lock.exists():
        idle = 0 if is_open(lock) else idle + 1
        if idle == LOOKS:
            print(f"removing {lock}: left behind by a build that was killed", flush=True)
            lock.unlink(missing_ok=True)
            return
        time.sleep(LOOK_S)


def is_open(path: Path) -> bool:
    """Whether any process whose files we may see has this one open."""
    with contextlib.suppress(FileNotFoundError):
        wanted = path.stat()
        return any(os.path.samestat(wanted, found) for found in _open_files())
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
    """Wait for every other build by us. The kernel ends the lock with its holder."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run's build of DeepSpeed's CPUAdam", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build it, and say where it lies."""
    from tasks.process.block_unused_imports import start_lean

    start_lean()
    print(f"DeepSpeed's CPUAdam: {build_cpu_adam()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
