"""Ends with the status of its argument while threads of gloo wait to let go of tensors.

A program that returns is aborted then. A thread that has done a collective drops its tensors, for
which it needs Python's lock, and the main thread goes on to the end without giving that away: here
on purpose, in a rank by chance.
"""

from __future__ import annotations

import atexit
import sys
import time


def keep_the_lock() -> None:
    """Have every thread that has something to drop wait."""
    until = time.perf_counter() + 1
    while time.perf_counter() < until:
        pass


atexit.register(keep_the_lock)  # first, so that it runs last: others give the lock away

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tasks.process.torch_process import end_process  # noqa: E402

KEPT = []
"""Process groups that are referred to until the end, as DeepSpeed does: their threads live on."""


def main(status: str) -> None:
    """More gathers than are done when the last one has been asked for, and the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    sys.setswitchinterval(1000)
    for _ in range(20):
        dist.all_gather([torch.zeros(1 << 20)], torch.ones(1 << 20), async_op=True)
    dist.destroy_process_group()
    atexit.register(print, "at exit")
    sys.stdout.write("left\n")
    end_process(int(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
