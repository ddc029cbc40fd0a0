"""A flow of three small stages, wired as `flows/commands/rlhf.py` does it.

Arguments: the folder of runs, a number. The first stage is the same for every number.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.cli.config import compose_config
from flows.cli.entry import exit_on_signals, to_stderr
from flows.cli.outcome import exit_status
from flows.orchestration.deployment import hold_runs
from flows.servers.prefect_server import prefect_server
from tasks.pipeline.locks import Patience, hold
from tasks.pipeline.report import StageReport
from tasks.pipeline.stage import Stage

STAGES = [Stage(name, "weights", ("tasks.core.errors",)) for name in ("base", "train", "convert")]


def write(out: Path, *, number: str, log: Any, before: Path | None = None) -> StageReport:
    (out / "text.txt").write_text(number if before is None else (before / "text.txt").read_text())
    return StageReport("weights", checks=(), metrics={"n": 1.0})


def body(runs: Path, number: str) -> dict[str, Any]:
    from flows.orchestration.flow_run import FlowRun, tracker_of
    from flows.orchestration.prefect_tasks import in_prefect

    composed = compose_config([f"paths.runs={runs}"])

    def stages(flow_run: FlowRun) -> None:
        run, inputs = flow_run.mechanism.run, {}
        for stage, text in zip(STAGES, ("shared", number, number), strict=True):
            made = run(stage, write, inputs=inputs, config={"number": text})
            inputs = {"before": made.artifact}

    with hold_runs(runs, None) as patience:
        host = in_prefect("tiny", patience)
        flow_run = FlowRun.begin("tiny", composed, host, tracker=tracker_of(composed))
        return flow_run.run(f"tiny {number}", stages)


def main(runs: Path, number: str) -> int:
    bootstrap(runs.parent, runs)
    with hold(runs, Patience(None, to_stderr)) as held, prefect_server(runs, held):
        from prefect import flow

        from flows.orchestration.failure import reported
        from flows.servers.prefect_watch import final_state

        tiny = flow(lambda: reported(partial(body, runs, number)), name="tiny")
        tiny = tiny.with_options(flow_run_name=f"tiny-{number}")
        return exit_status(final_state(partial(tiny, return_state=True)), runs)


if __name__ == "__main__":
    with exit_on_signals():
        status = main(Path(sys.argv[1]), sys.argv[2])
    sys.exit(status)
