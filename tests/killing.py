"""Kill a process at each change that it makes on the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.chmod")


def kills(work: Callable[[], object]) -> Iterator[int]:
    """Yield after each kill of a forked process that does `work`.

    The first is killed before its first change of the disk, the second before its second, and so
    on until one ends by itself.
    """
    number = 0
    while _killed(work, number):
        yield number
        number += 1


def _killed(work: Callable[[], object], number: int) -> bool:
    pid = os.fork()
    if pid == 0:
        left = [number]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES or (event == "open" and arguments[2] & os.O_ACCMODE):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return os.WIFSIGNALED(status)
