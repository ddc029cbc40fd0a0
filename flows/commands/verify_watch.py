"""Verify a server again and again (`watch=60`), with a text file for Prometheus.

The textfile collector of node_exporter reads the file (docs/operations.md), which is replaced as a
whole after each check. A server that does not answer is -1, and the watch goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from flows.monitoring.run_record import replace_file
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.redaction import redact
from tasks.core.terminal import plain
from tasks.verify.report import Outcome, Report

FILE = "verify.prom"
VALUES: Mapping[str, float] = {
    "verified": 1.0, "fault": 0.0, "unverified": -1.0,
    "ok": 1.0, "unknown": -1.0,
}  # fmt: skip
LABELS = ("url", "model", "source")


class Question(Protocol):
    """A server and the reference that it is compared with (`verify.Question`)."""

    def answer(self) -> Report:
        """Run all checks."""


Ask = Callable[[Mapping[str, Any]], Question]
"""Finds the server of the settings; raises for mistakes of the user and without an answer."""


def watch(
    settings: Mapping[str, Any], runs: Path, *, ask: Ask, write: Callable[[Report, str], None]
) -> int:
    """Verify until a signal ends the process, which is the only end.

    Args:
        settings: of the command, with `watch` in seconds.
        runs: `paths.runs`, for the file of metrics if `prometheus` is null.
        ask: finds the server.
        write: writes a report to `out`.

    Raises:
        ConfigError: the first check could not begin, or a file cannot be written.
    """
    path = settings["prometheus"]
    file = Path(path).expanduser() if path else runs / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    ask(settings)  # a mistake of the user ends the command; an outage later does not
    counts: Counter[str] = Counter()
    before = ""
    while True:
        began = time.monotonic()
        report, line = _check(settings, ask)
        outcome: Outcome = report.outcome if report else "unverified"
        counts[outcome] += 1
        text = report.text() if report and outcome != before and outcome != "verified" else line
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {plain(text)}", flush=True)
        before = outcome
        if report and settings["out"] is not None:
            write(report, settings["out"])
        try:
            replace_file(file, metrics(settings, report, counts), mode=0o644)
        except OSError as error:
            hint = "prometheus=<file>.prom"
            raise ConfigError(f"{file}: {error.strerror}", hint=hint) from error
        time.sleep(max(0.0, settings["watch"] - (time.monotonic() - began)))


def _check(settings: Mapping[str, Any], ask: Ask) -> tuple[Report | None, str]:
    """Return the report and its line; None with the reason if the server does not answer."""
    try:
        report = ask(settings).answer()
    except PlumblineError as error:
        return None, f"NOT VERIFIED: {'; '.join([error.message, *error.details])}"
    return report, report.line


def metrics(settings: Mapping[str, Any], report: Report | None, counts: Mapping[str, int]) -> str:
    """Return the text for Prometheus.

    Args:
        settings: of the command.
        report: the last report; None if the server did not answer.
        counts: checks since the start, by verdict.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest
    from prometheus_client import Counter as Total

    registry = CollectorRegistry()
    known = (
        report.url if report else redact(settings["url"]),
        (report.model if report else settings["name"]) or "",
        settings["source"],
    )

    def gauge(name: str, about: str, values: Mapping[Any, float], *more: str) -> None:
        family = Gauge(f"plumbline_verify_{name}", about, (*LABELS, *more), registry=registry)
        for labels, value in values.items():
            family.labels(*known, *labels).set(value)

    outcome = report.outcome if report else "unverified"
    gauge("verdict", "1: verified, 0: a fault, -1: not verified", {(): VALUES[outcome]})
    gauge("last_timestamp_seconds", "when the last check ended", {(): time.time()})
    total = Total(
        "plumbline_verify_checks", "checks since the start", (*LABELS, "verdict"), registry=registry
    )
    for verdict in ("verified", "fault", "unverified"):
        total.labels(*known, verdict).inc(counts.get(verdict, 0))
    if report is not None:
        gauge("seconds", "wall-clock time of the last check", {(): report.seconds})
        verdicts = {(check.code,): VALUES[check.verdict] for check in report.checks}
        gauge("check", "1: ok, 0: a fault, -1: not proven", verdicts, "check")
        numbers = {
            (check.code, name): float(value)
            for check in report.checks
            for name, value in check.measured.items()
            if not isinstance(value, str)
        }
        gauge("measured", "numbers of the checks", numbers, "check", "name")
        causes = {(cause.code,): 1.0 for cause in report.causes}
        gauge("cause", "likely causes of a fault", causes, "cause")
    text: str = generate_latest(registry).decode()
    return text
