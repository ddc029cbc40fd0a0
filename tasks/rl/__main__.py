"""A rank's entry: `torchrun ... -m tasks.rl job.json`. As `tasks/training/__main__.py`."""

from __future__ import annotations

import sys

from tasks.training.entry import enter

if __name__ == "__main__":
    enter(sys.argv[1], "tasks.rl.run")
