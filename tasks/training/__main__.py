"""Command of a rank: `torchrun ... -m tasks.training job.json`; see `entry.py`."""

from __future__ import annotations

import sys

from tasks.training.entry import enter

if __name__ == "__main__":
    enter(sys.argv[1], "tasks.training.run")
