"""Run a trainer's command with `WitnessCallback` in every Trainer that it makes.

    python -m plumbline_witness -- llamafactory-cli train config.yaml
    python -m plumbline_witness -- torchrun --nproc-per-node 8 train.py

The command and its child processes get a `sitecustomize` module, which registers the callback when
`transformers.trainer` is imported. No file of the trainer is changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
USAGE = "usage: python -m plumbline_witness -- <command> [arguments]"


def main() -> int:
    """Replace this process by the command. Returns 2 if there is none, 127 if it is not found."""
    words = sys.argv[1:]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    paths = [str(HERE / "inject"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"plumbline_witness: {words[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
