"""Ends while a thread of gloo waits to let go of a tensor: `returns` as a program does, or `ends`.

The first argument says which. A thread that has done a collective drops its tensors, for which it
needs Python's lock. Whoever has that lock and goes on to the end without giving it away is the main
thread here on purpose, in a rank it is so by chance.
"""

from __future__ import annotations

import atexit
import sys
import time

import torch
import torch.distributed as dist

from tasks.ending import end_process

KEPT = []
"""Process groups that are referred to until the end, as DeepSpeed does: their threads live on."""


def main(how: str) -> None:
    """One gather that nobody waits for, half a second of Python, and the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    atexit.register(print, "at exit")
    sys.setswitchinterval(1000)
    dist.all_gather([torch.zeros(3)], torch.ones(3), async_op=True)
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        pass
    dist.destroy_process_group()
    sys.stdout.write("left\n")
    if how == "ends":
        end_process(int(sys.argv[2]))


if __name__ == "__main__":
    main(sys.argv[1])
