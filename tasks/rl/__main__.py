"""Entry point of one rank: `torchrun ... -m tasks.rl job.json`."""

from __future__ import annotations

import sys

from tasks.training.entry import enter

if __name__ == "__main__":
    enter(sys.argv[1], "tasks.rl.run")
