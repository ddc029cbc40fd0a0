"""Remove what no run, no registered model and no interrupted training needs any more.

    python flows/prune.py keep=10                show what would go: unused in the last 10 runs
    python flows/prune.py older_than=30          show what would go: unused in the last 30 days
    python flows/prune.py keep=10 older_than=30  show what meets both
    python flows/prune.py keep=10 yes=true       remove it

Artifacts of registered models and all that they were made from stay until their version is deleted
in MLflow. Waits while runs use the folder. Exit status: 0 done, 1 a folder cannot be removed, 2 the
command line is wrong or MLflow does not answer, and nothing was removed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "prune")

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime

from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.output import no_folder
from flows.cli.registry import DATABASE, registry
from tasks.core.errors import Finding, preflight
from tasks.core.terminal import in_words, plain, to_stderr
from tasks.pipeline.locks import Patience, hold
from tasks.pipeline.retention import Plan, plan, remove
from tasks.tracking.mlflow_server import Version

MAX_LINES = 40
_STATUS = {"registered": "registered models", "resumable": "runs that may go on", "recent": "runs"}


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    settings = composed.settings
    bootstrap(composed.runs)
    preflight(list(_problems(composed)))
    alone = hold(composed.runs, Patience(settings["paths"]["wait_s"], to_stderr), alone=True)
    with alone if settings["yes"] else nullcontext():
        planned = _planned(composed)
        if settings["yes"]:
            remove(planned)
    _print(planned)
    if planned.items and not settings["yes"]:
        print("nothing was removed; add yes=true")
    return 0


def _planned(composed: Composed) -> Plan:
    settings, versions, uri = composed.settings, list[Version](), ""
    if settings["tracking"]["uri"] or (composed.runs / DATABASE).is_file():
        uri = composed.tracking_uri
        with registry(composed) as server:
            versions = server.versions()
    return plan(
        composed.runs,
        [(version.path, version.digest) for version in versions],
        uri,
        now=time.time(),
        keep=settings["keep"],
        days=settings["older_than"],
        unfinished=settings["unfinished"],
    )


def _problems(composed: Composed) -> Iterator[Finding]:
    settings = composed.settings
    if settings["keep"] is None and settings["older_than"] is None:
        yield Finding("keep", "null", "nothing says what is old", "keep=10, or older_than=30")
    yield from no_folder("paths.runs", str(composed.runs))


def _print(planned: Plan) -> None:
    for item in planned.items[:MAX_LINES]:
        used = f"{datetime.fromtimestamp(item.used):%Y-%m-%d %H:%M}"
        print(plain(f"{item.what:17} {in_words(item.freed):>10}  last used {used}  {item.path}"))
    if len(planned.items) > MAX_LINES:
        print(f"... and {len(planned.items) - MAX_LINES} more")
    freed = sum(item.freed for item in planned.items)
    print(f"remove: {len(planned.items)} folders, {in_words(freed)}")
    counts = Counter(planned.kept.values())
    kept = ", ".join(f"{number} {_STATUS.get(why, why)}" for why, number in counts.items())
    print(f"keep: {len(planned.kept)} artifacts" + (f" ({kept})" if kept else ""))
    for folder in planned.checkpoints:
        print(plain(f"keep: checkpoints of an unfinished training  {folder}"))
