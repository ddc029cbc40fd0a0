"""Run one of Plumbline's commands: `plumbline <command> ...`.

    plumbline train +exp=qlora               post-train a model: python flows/rlhf.py +exp=qlora
    plumbline plan +exp=qlora                what that would do, and what it would cost: plan=true
    plumbline list [WORD]                    the experiments, by folder; those with a word
    plumbline deliver DIR base=DIR out=DIR   merge, convert and prove a checkpoint made elsewhere
    plumbline audit DIR                      find what is wrong with a checkpoint
    plumbline verify url=URL source=DIR      ask a running server whether it is the trained model
    plumbline bisect a=DIR b=DIR             find the first module in which two models differ
    plumbline promote models:/NAME/3         let `champion` name a registered model; roll back
    plumbline serve models:/NAME@champion    check every byte, then vllm serve
    plumbline compare A B                    two runs: settings, drift, which model is better
    plumbline status                         what runs and what ran
    plumbline prune keep=10                  remove what no run needs any more

Each is a file of `flows/` under a shorter name: the same settings, output and exit statuses.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib.util import find_spec
from typing import NoReturn

from flows.cli.start import start
from tasks.core.terminal import STARTED

COMMANDS = (
    "train", "plan", "list", "deliver", "audit", "verify", "bisect", "promote", "serve",
    "compare", "status", "prune",
)  # fmt: skip
HYDRA = {"rlhf": "flows.chain.run_chain", "deliver": "flows.delivery.run_delivery"}
"""Modules of the commands whose configuration Hydra composes."""
HELP = ("help", "--help", "-h")
NEED_TORCH = ("train", "deliver", "bisect")
"""Commands for which `pip install plumbline` is not enough; `make setup` installs everything."""


def main() -> NoReturn:
    """Run the command line of this process and end it with the command's exit status."""
    words = sys.argv[1:]
    if not words or words[0] in HELP:
        print((__doc__ or "").strip(), file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    command, rest = words[0], words[1:]
    if command == "list":
        from flows.cli.usage import listed_experiments

        print("\n".join(listed_experiments(rest)))
        sys.exit(0)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"plumbline {' '.join([near[0], *rest])}" if near else "plumbline help"
        print(f"plumbline: there is no command {command!r} -> {hint}", file=sys.stderr)
        sys.exit(2)
    if command in NEED_TORCH and find_spec("torch") is None:
        hint = "pip install 'plumbline[train,serve]', or make setup in a checkout"
        print(
            f"plumbline: {command} needs torch, which is not installed -> {hint}", file=sys.stderr
        )
        sys.exit(2)
    os.environ[STARTED] = "1"
    # Help names the command by this; Hydra puts it into no file.
    sys.argv = [f"plumbline {command}", *rest, *(["plan=true"] if command == "plan" else [])]
    module = "rlhf" if command in ("train", "plan") else command
    if module in HYDRA:
        start(HYDRA[module])
    start("flows.cli.tool", module)


if __name__ == "__main__":
    main()
