"""A small flow, wired as `flows/commands/rlhf.py` does it: started as a process by the tests.

Arguments: the folder of runs, then one mode for each flow run: quick (20 tasks), fail, long*.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from flows.cli.bootstrap import bootstrap
from flows.cli.entry import exit_on_signals
from flows.servers.prefect_server import _running, prefect_server, preload
from tasks.pipeline.locks import hold
from tasks.process.launch import kill_children_on_abort


def main(runs: Path, modes: list[str]) -> int:
    bootstrap(runs.parent, runs)
    failed = 0
    for mode in modes:
        preload(runs)
        with hold(runs) as held, prefect_server(runs, held), kill_children_on_abort():
            from flows.servers.prefect_watch import current, final_state
            from tests.process.flow_demo import demo

            for child, api in _running.values():
                print("server", child.pid, api.url, api.auth, flush=True)
            state = final_state(partial(demo, mode, runs / "logs", return_state=True))
            if (watch := current()) is not None and watch.report():
                print(state.result(), watch.report(), flush=True)
            failed += not state.is_completed()
    return 1 if failed else 0


if __name__ == "__main__":
    with exit_on_signals():
        status = main(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(status)
