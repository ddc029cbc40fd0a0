"""Run a flow and its body: errors of ours become its state.

The body's own outcome counts: a run whose Prefect server has gone away ends with its own exit
status, though Prefect's engine cannot record that end.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from flows.cli.bootstrap import bootstrap, quiet_logging
from flows.cli.composed import Composed
from flows.servers import prefect_server
from tasks.config.checks import preflight
from tasks.config.checks.servers import prefect_reachable, public, reachable
from tasks.core.errors import PlumblineError
from tasks.core.private import stay_private
from tasks.core.redaction import redact, redact_error, without_passwords
from tasks.core.terminal import plain, to_stderr
from tasks.pipeline.locks import Patience, hold
from tasks.process.child import PROJECT

log = logging.getLogger(__name__)

_outcome: Any = None
"""Final state of the body that has run last in this process."""


def reported(work: Callable[[], dict[str, Any]]) -> Any:
    """Run the body of a flow, so that Prefect's pages show the report of an error of ours.

    Prefect's own message of a raised error is its first line, with a traceback in the logs. A
    failed state, which Prefect takes as that of the flow run, has the problems and what to type.
    """
    global _outcome
    from prefect import get_run_logger
    from prefect.states import Completed, Failed

    from flows.orchestration.prefect_tasks import in_deployment

    quiet_logging()  # a worker's process has not called `bootstrap`
    if in_deployment():
        stay_private()
    try:
        result = work()
    except PlumblineError as error:
        report = plain(error.report())
        if in_deployment():  # on a terminal the command prints it
            get_run_logger().error("%s", report)
        _outcome = Failed(message=report, data=error)
        return _outcome
    except Exception as error:
        redact_error(error)  # Prefect records its message
        _outcome = Failed(message=redact(str(error)), data=error)
        raise
    _outcome = Completed(data=result)
    return result


def start(
    module: str, composed: Composed, overrides: list[str], body: Callable[[], dict[str, Any]]
) -> Any:
    """Run a flow (`flows.rlhf:rlhf`) with a Prefect server, an embedded one if there is no other.

    `body` is called in place of the flow's own, which would read and check everything again.
    Returns the final state of the flow run; that of its body if Prefect's server could not take it.
    Raises PlumblineError if Prefect's server has gone away before the run began.
    """
    place, _, name = module.partition(":")

    def warm_up() -> None:
        """Import a flow and open MLflow, while the Prefect server starts."""
        import_module(place)
        import_module("mlflow")
        if not composed.settings["tracking"]["uri"]:  # else the user's server has its database
            from flows.orchestration.flow_run import tracker_of

            with contextlib.suppress(Exception):  # the flow tries again and reports the error
                _ = tracker_of(composed).experiment_id

    with prefect_server(composed.runs, warm_up):
        import httpx
        from prefect import Flow

        flow = getattr(import_module(place), name)

        def prepared(overrides: list[str] | None = None, tag: str = "manual") -> Any:
            return reported(body)

        flow = Flow(
            prepared, name=flow.name, flow_run_name=flow.flow_run_name, persist_result=False
        )
        global _outcome
        _outcome, tag = None, composed.recorded["tag"] or "manual"
        try:
            return flow(without_passwords(overrides), tag=tag, return_state=True)
        except Exception as error:
            if _outcome is not None:
                what = "Prefect's server has not recorded the end of this run: %s"
                log.warning(what, redact(str(error)))
                return _outcome
            if not isinstance(error, httpx.HTTPError):
                raise
            url = redact(os.environ.get("PREFECT_API_URL", ""))
            what = f"Prefect's server at {url} does not answer: {error}"
            raise PlumblineError(what, hint="start it again, and type the same command") from None


def run_recorded(name: str, composed: Composed, overrides: list[str]) -> Any:
    """Run a flow of `flows/recorded.py` for a command with `prefect=true`. Returns its result."""
    bootstrap(PROJECT, composed.runs)
    tracking = composed.settings["tracking"]
    preflight([*reachable(tracking["uri"]), *prefect_reachable(), *public(tracking)])

    def body() -> Any:
        return getattr(import_module("flows.recorded"), f"record_{name}")(composed)

    with hold(composed.runs, Patience(composed.settings["paths"]["wait_s"], to_stderr)):
        state = start(f"flows.recorded:{name}", composed, overrides, body)
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        raise result
    return result
