"""Open the pages of a folder of runs: report, Prefect and MLflow, from servers on loopback.

    python flows/open.py                        the pages of the folder `runs`
    python flows/open.py paths.runs=DIR         of another folder of runs

Servers that do not run yet are started as by `make up`, and stay until `make down`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "open")

import json
import os
import subprocess
import webbrowser
from collections.abc import Iterator
from contextlib import suppress

from flows.cli.composed import Composed
from flows.cli.output import no_folder
from flows.servers.services import LOOPBACK, mlflow_of, record_of, running_server, services_of
from tasks.core.errors import ConfigError
from tasks.core.finding import preflight
from tasks.core.terminal import to_stderr
from tasks.process.child import PROJECT

SERVICES = "infra.servers.services"


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    runs = composed.runs
    preflight(list(no_folder("paths.runs", str(runs))))
    if not running_server(runs) and (status := _start(runs)):
        return status
    shown = dict(_pages(runs))
    for name, url in shown.items():
        print(f"{name:<8} {url}")
    if sys.stdout.isatty() and any(os.environ.get(d) for d in ("DISPLAY", "WAYLAND_DISPLAY")):
        webbrowser.open(next(iter(shown.values())))
    return 0


def _start(runs: Path) -> int:
    """Start the servers. Returns the exit status of `make up`.

    Raises:
        ConfigError: this is no checkout.
    """
    if not (PROJECT / "infra" / "servers").is_dir():
        raise ConfigError(
            "the servers are part of a checkout, not of the installed package",
            hint=f"make up PLUMBLINE_RUNS={runs}, in a checkout",
        )
    to_stderr(f"starting servers; they end by: make -C {PROJECT} down PLUMBLINE_RUNS={runs}")
    done = subprocess.run(
        [sys.executable, "-P", "-m", SERVICES, "up"],
        cwd=PROJECT,
        env=os.environ | {"PLUMBLINE_RUNS": str(runs), "PYTHONPATH": str(PROJECT)},
        stdout=sys.stderr,
        check=False,
    )
    return done.returncode


def _pages(runs: Path) -> Iterator[tuple[str, str]]:
    """Yield names and addresses of pages; the first one is that of the last run."""
    with suppress(OSError, ValueError, KeyError):
        summary = json.loads((runs / "latest" / "summary.json").read_text())
        yield from (("last run", url) for url in list(summary["pages"].values())[:1])
    if (report := runs / "latest" / "report.html").is_file():
        yield "report", report.resolve().as_uri()
    if (prefect := record_of("prefect", services_of(runs))) is not None:
        yield "Prefect", f"http://{LOOPBACK}:{prefect.port}/runs"
    if mlflow := mlflow_of(runs):
        yield "MLflow", mlflow
