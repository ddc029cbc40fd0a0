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
    # The project's root replaces flows/ on the path: modules in flows/ would shadow libraries.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "verify")

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from flows.cli.composed import Composed
from flows.monitoring.run_record import replace_file
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.files import meant
from tasks.core.finding import Finding
from tasks.core.private import open_up
from tasks.core.redaction import redact
from tasks.core.terminal import json_text, plain, typed
from tasks.verify.reference import Reference, read_reference
from tasks.verify.run import EXIT_STATUS, Outcome, Report, Target, choose, verify
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
    problems = [str(finding) for finding in _local_problems(settings)]
    source = _folder(settings["source"] or ".")
    reference = server = target = None
    if not any(line.startswith("source") for line in problems):
        try:
            reference = read_reference(source)
        except PlumblineError as error:
            problems.append(_line(f"source={settings['source']}", error))
    if not any(line.startswith(("url", "timeout_s", "workers", "ca")) for line in problems):
        url = settings["url"]
        kind = None if settings["kind"] == "auto" else settings["kind"]
        try:
            options = {key: settings[key] for key in ("timeout_s", "workers", "ca")}
            options["ca"] = settings["ca"] and str(_folder(settings["ca"]))
            server = connect(url, kind, model=settings["name"], **options)
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
    if url is None:
        yield Finding("url", "not set", "the address of the server", "url=http://<host>:8000")
    elif urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        rest = redact(url.partition("://")[2] or url)
        yield Finding(
            "url", redact(url), "it starts with http:// or https://", f"url=http://{rest}"
        )
    if source is None:
        allowed = "the folder of what was trained"
        yield Finding("source", "not set", allowed, "source=<folder with plumbline.witness>")
    elif not _folder(source).is_dir():
        what = "a file" if _folder(source).is_file() else "no such folder"
        allowed = "the folder of what was trained"
        override = typed("source", meant(_folder(source)) or "<folder>")
        yield Finding(f"source={source}", what, allowed, override)
    elif out not in (None, "-") and _folder(out).resolve().is_relative_to(
        _folder(source).resolve()
    ):
        yield Finding("out", out, f"source={source} is only read", "out=<a file elsewhere>")
    if out not in (None, "-") and not _folder(out).parent.is_dir():
        yield Finding("out", out, "its folder does not exist", "out=<a file in a folder>")
    if settings["ca"] is not None and not _folder(settings["ca"]).is_file():
        yield Finding("ca", settings["ca"], "no such file", "ca=<file with certificates>")
    if every is not None and out == "-":
        yield Finding("out", out, "watch prints one line for each check", "out=report.json")
    if every is not None and settings["prefect"]:
        allowed = "Prefect repeats a flow by a schedule of the deployment verify-served"
        yield Finding("watch", str(every), allowed, "watch=null, or prefect=false")
    if every is not None and settings["prometheus"] is not None:
        yield from _metrics_file(settings["prometheus"])


def _metrics_file(path: str) -> Iterator[Finding]:
    """Yield a finding if this is no place for a file that node_exporter reads."""
    file = _folder(path)
    if file.suffix != ".prom":
        hint = f"prometheus={file}.prom"
        yield Finding("prometheus", path, "node_exporter reads *.prom only", hint)
    elif not file.parent.is_dir():
        yield Finding("prometheus", path, "its folder does not exist", "prometheus=null")


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
    path = _folder(out)
    is_junit = path.suffix == ".xml"
    text = report.junit() if is_junit else json_text(report.as_json()) + "\n"
    try:
        path.write_text(text)
        open_up(path)
    except OSError as error:
        raise ConfigError(f"out={path}: {error.strerror}", hint="out=<a file elsewhere>") from error


def _line(what: str, error: PlumblineError) -> str:
    """Return an error as one line, with what to type."""
    return plain(f"{what}: {error.message}" + (f" -> {error.hint}" if error.hint else ""))


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()


def watch(settings: Mapping[str, Any], runs: Path) -> int:
    """Verify until a signal ends the process, which is the only end.

    Args:
        settings: of the command, with `watch` in seconds.
        runs: `paths.runs`, for the file of metrics if `prometheus` is null.

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
        report, line = _check(settings)
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


def _check(settings: Mapping[str, Any]) -> tuple[Report | None, str]:
    """Return the report and its line; None with the reason if the server does not answer."""
    try:
        report = ask(settings).answer()
    except PlumblineError as error:
        return None, f"NOT VERIFIED: {'; '.join([error.message, *error.details])}"
    return report, report.line


def metrics(settings: Mapping[str, Any], report: Report | None, counts: Mapping[str, int]) -> str:
    """Return the text for Prometheus.

    Args:
        report: the last report; None if the server did not answer.
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
