"""A small flow, wired as `flows/cli/rlhf_command.py` does it: started as a process by the tests.

Arguments: the folder of runs, then one mode for each flow run: quick (20 tasks), fail, long*.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flows.cli.bootstrap import bootstrap
from flows.cli.entry import exit_on_signals
from flows.cli.lock import hold
from flows.orchestration.prefect_server import _running, prefect_server
from tasks.process.launch import kill_children_on_abort


def main(runs: Path, modes: list[str]) -> int:
    bootstrap(runs.parent, runs)
    failed = 0
    for mode in modes:
        with hold(runs), prefect_server(runs), kill_children_on_abort():
            from tests.process.flow_demo import demo

            for child, api in _running.values():
                print("server", child.pid, api.url, flush=True)
            state = demo(mode, runs / "logs", return_state=True)
            failed += not state.is_completed()
    return 1 if failed else 0


if __name__ == "__main__":
    with exit_on_signals():
        status = main(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(status)
