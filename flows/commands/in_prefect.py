"""Run a command's work as a Prefect flow, for the commands that do without Prefect by default."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.cli.config import Composed
from flows.cli.entry import to_stderr
from tasks.core.redaction import without_passwords

PROJECT = Path(__file__).resolve().parents[2]


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
    from flows.servers.prefect_server import prefect_server, warm_up
    from flows.servers.prefect_watch import final_state
    from tasks.config.checks import preflight
    from tasks.config.checks.tracking import prefect_reachable, public, reachable
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
