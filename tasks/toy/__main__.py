"""Child process that makes the toy base: `python -m tasks.toy job.json`.

The job is a JSON object `{"out": folder, "steps": int, "seed": int}`. Progress and results are
printed as events (`tasks/core/events.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tasks.core.events import emit
from tasks.process.block_unused_imports import start_lean
from tasks.process.exit_process import end_process
from tasks.toy.pretrain import pretrain


def main(argv: list[str]) -> None:
    """Run the job described by the file named in `argv[1]`."""
    # transformers would import both only to check whether they are in use, which takes 4 s.
    start_lean("deepspeed", "peft")
    job = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    facts = pretrain(Path(job["out"]), steps=job["steps"], seed=job["seed"])
    emit("pretrained", **facts)


if __name__ == "__main__":
    main(sys.argv)
    end_process()
