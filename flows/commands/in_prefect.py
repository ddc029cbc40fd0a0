"""Run commands as Prefect flows: what they prepare, and those that need no Prefect by default."""

from __future__ import annotations

import contextlib
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from tasks.core.redaction import without_passwords
from tasks.core.terminal import to_stderr
from tasks.pipeline.source_closure import closure

PROJECT = Path(__file__).resolve().parents[2]


def warm_up(composed: Composed, flow: str) -> None:
    """Import a flow, read its sources and open MLflow, while the Prefect server starts.

    Args:
        composed: the configuration.
        flow: module of the flow.
    """
    import_module(flow)
    import_module("mlflow")
    closure([flow])  # parsed once per process, for the keys of the stages
    if composed.settings["tracking"]["uri"]:
        return  # the user's server has its database
    from flows.orchestration.flow_run import tracker_of

    with contextlib.suppress(Exception):  # the flow tries again and reports the error
        _ = tracker_of(composed).experiment_id


def run_in_prefect(name: str, composed: Composed, overrides: list[str]) -> Any:
    """Run the flow of `flows/<name>.py` and return its result.

    Prefect and MLflow are imported here, so that a command without them starts in a second.

    Args:
        name: the flow, and the module that has it: "audit" or "verify".
        composed: the configuration.
        overrides: the words of the command line.

    Raises:
        ConfigError: the servers in the settings cannot be reached.
        PlumblineError: as the flow.
    """
    bootstrap(PROJECT, composed.runs)
    from flows.orchestration.flow_body import final_state
    from flows.servers.prefect_server import prefect_server
    from tasks.config.checks import preflight
    from tasks.config.checks.release import prefect_reachable, public, reachable
    from tasks.pipeline.locks import Patience, hold

    settings, module = composed.settings, f"flows.{name}"
    tracking = settings["tracking"]
    preflight([*reachable(tracking["uri"]), *prefect_reachable(), *public(tracking)])
    with (
        hold(composed.runs, Patience(settings["paths"]["wait_s"], to_stderr)) as held,
        prefect_server(composed.runs, held, meanwhile=partial(warm_up, composed, module)),
    ):
        flow = getattr(import_module(module), name)
        tag = composed.recorded["tag"] or "manual"
        state = final_state(partial(flow, without_passwords(overrides), tag=tag, return_state=True))
        result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        raise result
    return result
