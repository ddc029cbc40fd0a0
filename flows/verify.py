"""Ask a running server, and say whether it is the model that was trained.

    python flows/verify.py url=http://host:8000 source=DIR       the verdict, in seconds
    python flows/verify.py url=URL source=DIR name=my-lora       one of several models
    python flows/verify.py url=URL source=DIR out=report.json    as JSON; out=report.xml as JUnit
    python flows/verify.py url=URL source=DIR watch=60           again every 60 s, for monitoring
    python flows/verify.py url=URL source=DIR prefect=true       recorded: a flow run, an MLflow run

DIR has a folder plumbline.witness, which the trainer wrote, or was served by Plumbline. It needs no
GPU and no torch. The API key of the server is read from the variable PLUMBLINE_API_KEY. Exit
status: 0 verified, 1 a fault was found, 2 the server could not be verified, or the command line is
wrong. docs/verify.md says what is proven and what cannot be.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "verify")

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.cli.composed import Composed
from flows.cli.output import folder, inside, no_folder, write_report
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.finding import Finding
from tasks.core.redaction import redact
from tasks.core.terminal import json_text, plain
from tasks.verify.reference import Reference, read_reference
from tasks.verify.run import EXIT_STATUS, Report, Target, choose, verify
from tasks.verify.servers.connect import connect
from tasks.verify.servers.server import Server

FILE = "verify.prom"
VALUES: Mapping[str, float] = {
    "verified": 1.0, "fault": 0.0, "unverified": -1.0,
    "ok": 1.0, "unknown": -1.0,
}  # fmt: skip
LABELS = ("url", "model", "source")


@dataclass(frozen=True)
class Question:
    """A server, the model on it, and the reference that it is compared with."""

    server: Server
    target: Target
    reference: Reference
    profile: str

    def answer(self) -> Report:
        """Run all checks."""
        return verify(self.server, self.target, self.reference, self.profile)


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    settings = composed.settings
    if settings["prefect"]:
        from flows.orchestration.flow_body import run_recorded

        return EXIT_STATUS[run_recorded("verify", composed, words)["verdict"]]
    if settings["watch"] is not None:
        return watch(settings, composed.runs)
    report = ask(settings).answer()
    show(report, settings["out"])
    return EXIT_STATUS[report.outcome]


def ask(settings: Mapping[str, Any]) -> Question:
    """Find the server, the model and the reference.

    Raises:
        ConfigError: the details have a line for each mistake of the user, those that only the
            server can tell included.
    """
    findings = list(_local_problems(settings))
    wrong, problems = {finding.what for finding in findings}, [str(each) for each in findings]
    source = folder(settings["source"] or ".")
    reference = server = target = None
    if "source" not in wrong:
        try:
            reference = read_reference(source)
        except PlumblineError as error:
            problems.append(_line(f"source={settings['source']}", error))
    if not wrong & {"url", "ca"}:
        url, ca = settings["url"], settings["ca"] and str(folder(settings["ca"]))
        kind = None if settings["kind"] == "auto" else settings["kind"]
        options = {key: settings[key] for key in ("timeout_s", "workers")}
        try:
            server = connect(url, kind, model=settings["name"], ca=ca, **options)
            served = server.models()
            target = choose(served, source, model=settings["name"], base=settings["base"])
        except ConfigError as error:
            problems += error.details or [_line("model", error)]
        except PlumblineError as error:
            problems.append(_line(f"url={redact(url)}", error))
    if problems or server is None or target is None or reference is None:
        count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
        raise ConfigError(f"{count}; nothing was verified", details=problems)
    return Question(server, target, reference, settings["profile"])


def _local_problems(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the mistakes that this machine can tell."""
    url, source, out, every = (settings[key] for key in ("url", "source", "out", "watch"))
    parts = urlsplit(url or "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        rest = redact((url or "").partition("://")[2] or url or "<host>:8000")
        yield Finding("url", redact(str(url)), "the server's address", f"url=http://{rest}")
    if source is None:
        allowed = "the folder of what was trained"
        yield Finding("source", "not set", allowed, "source=<folder with plumbline.witness>")
    else:
        yield from no_folder("source", source)
    yield from inside(settings, "source")
    if out not in (None, "-") and not folder(out).parent.is_dir():
        yield Finding("out", out, "its folder does not exist", "out=<a file in a folder>")
    if settings["ca"] is not None and not folder(settings["ca"]).is_file():
        yield Finding("ca", settings["ca"], "no such file", "ca=<file with certificates>")
    if every is not None and out == "-":
        yield Finding("out", out, "watch prints one line for each check", "out=report.json")
    if every is not None and settings["prefect"]:
        allowed = "Prefect repeats a flow by a schedule of the deployment verify-served"
        yield Finding("watch", str(every), allowed, "watch=null, or prefect=false")
    file = folder(settings["prometheus"] or FILE)
    if file.suffix != ".prom" or not file.parent.is_dir():
        allowed = "node_exporter reads *.prom, in a folder that exists"
        yield Finding("prometheus", str(file), allowed, "prometheus=<folder>/verify.prom")


def show(report: Report, out: str | None) -> None:
    """Print the report, and write it to `out` if it is a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    if out == "-":
        print(json_text(report.as_json()))
        return
    print(report.text())
    if out is not None:
        write(report, out)


def write(report: Report, out: str) -> None:
    """Write the report to a file: JUnit if its name ends with .xml, else JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    is_junit = Path(out).suffix == ".xml"
    write_report(out, report.junit() if is_junit else json_text(report.as_json()) + "\n")


def _line(what: str, error: PlumblineError) -> str:
    """Return an error as one line, with what to type."""
    return plain(f"{what}: {error.message}" + (f" -> {error.hint}" if error.hint else ""))


def watch(settings: Mapping[str, Any], runs: Path) -> int:
    """Verify until a signal ends the process, which is the only end.

    Args:
        settings: of the command, with `watch` in seconds.
        runs: `paths.runs`, for the file of metrics if `prometheus` is null.

    Raises:
        ConfigError: the first check could not begin, or a file cannot be written.
    """
    ask(settings)  # a mistake of the user ends the command; an outage later does not
    file = folder(settings["prometheus"] or str(runs / FILE))
    file.parent.mkdir(parents=True, exist_ok=True)
    metrics, before = Metrics(file, settings), ""
    while True:
        began = time.monotonic()
        report, line = _check(settings)
        outcome = report.outcome if report else "unverified"
        text = report.text() if report and outcome != before and outcome != "verified" else line
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {plain(text)}", flush=True)
        before = outcome
        if report and settings["out"] is not None:
            write(report, settings["out"])
        metrics.write(report)
        time.sleep(max(0.0, settings["watch"] - (time.monotonic() - began)))


def _check(settings: Mapping[str, Any]) -> tuple[Report | None, str]:
    """Return the report and its line; None with the reason if the server does not answer."""
    try:
        report = ask(settings).answer()
    except PlumblineError as error:
        return None, f"NOT VERIFIED: {'; '.join([error.message, *error.details])}"
    return report, report.line


class Metrics:
    """A file of metrics for Prometheus, as `node_exporter` reads it."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._file, self._registry = file, CollectorRegistry()
        self._place = (redact(settings["url"]), settings["name"] or "", settings["source"])

        def metric(kind: Any, name: str, about: str, *labels: str) -> Any:
            name, labels = f"plumbline_verify_{name}", (*LABELS, *labels)
            return kind(name, about, labels, registry=self._registry)

        self._checks = metric(Counter, "checks", "checks since the start", "verdict")
        self._verdict = metric(Gauge, "verdict", "1: verified, 0: a fault, -1: not verified")
        self._ended = metric(Gauge, "last_timestamp_seconds", "when the last check ended")
        self._check = metric(Gauge, "check", "1: ok, 0: a fault, -1: not proven", "check")
        self._measured = metric(Gauge, "measured", "numbers of the checks", "check", "name")
        self._cause = metric(Gauge, "cause", "likely causes of a fault", "cause")

    def write(self, report: Report | None) -> None:
        """Count a check and replace the file.

        Args:
            report: of the check; None if the server did not answer.

        Raises:
            ConfigError: the file cannot be written.
        """
        from prometheus_client import write_to_textfile

        outcome = report.outcome if report else "unverified"
        self._checks.labels(*self._place, outcome).inc()
        self._verdict.labels(*self._place).set(VALUES[outcome])
        self._ended.labels(*self._place).set_to_current_time()
        for last in (self._check, self._measured, self._cause):
            last.clear()
        for check in report.checks if report else ():
            self._check.labels(*self._place, check.code).set(VALUES[check.verdict])
            for name, value in check.measured.items():
                if not isinstance(value, str):
                    self._measured.labels(*self._place, check.code, name).set(value)
        for cause in report.causes if report else ():
            self._cause.labels(*self._place, cause.code).set(1)
        try:
            write_to_textfile(str(self._file), self._registry)
            self._file.chmod(0o644)  # for node_exporter, which is another user
        except OSError as error:
            hint = "prometheus=<file>.prom"
            raise ConfigError(f"{self._file}: {error.strerror}", hint=hint) from error
