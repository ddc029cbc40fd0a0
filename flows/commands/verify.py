"""Run `python flows/verify.py ...` and return its exit status, without Prefect and torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.cli.composed import Composed
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.files import meant
from tasks.core.finding import Finding
from tasks.core.private import open_up
from tasks.core.redaction import redact
from tasks.core.terminal import json_text, plain, typed
from tasks.verify.reference import Reference, read_reference
from tasks.verify.report import EXIT_STATUS, Report
from tasks.verify.run import Target, choose, verify
from tasks.verify.servers.connect import connect
from tasks.verify.servers.server import Server


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
        from flows.commands.in_prefect import run_in_prefect

        return EXIT_STATUS[run_in_prefect("verify", composed, words)["verdict"]]
    if settings["watch"] is not None:
        from flows.commands.verify_watch import watch

        return watch(settings, composed.runs, ask=ask, write=write)
    report = ask(settings).answer()
    show(report, settings["out"])
    return EXIT_STATUS[report.outcome]


def ask(settings: Mapping[str, Any]) -> Question:
    """Find the server, the model and the reference.

    Args:
        settings: of the command.

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
    if not (settings["timeout_s"] > 0 and math.isfinite(settings["timeout_s"])):
        yield Finding("timeout_s", str(settings["timeout_s"]), "seconds, above 0", "timeout_s=60")
    if not 1 <= settings["workers"] <= 256:
        yield Finding("workers", str(settings["workers"]), "1 to 256", "workers=8")
    if settings["ca"] is not None and not _folder(settings["ca"]).is_file():
        yield Finding("ca", settings["ca"], "no such file", "ca=<file with certificates>")
    if every is not None and not (every > 0 and math.isfinite(every)):
        yield Finding("watch", str(every), "seconds from check to check, above 0", "watch=60")
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
