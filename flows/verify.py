"""Ask a running server, and say whether it is the model that was trained.

    python flows/verify.py url=http://host:8000 source=DIR       the verdict, in seconds
    python flows/verify.py url=URL source=DIR name=my-lora       one of several models
    python flows/verify.py url=URL source=DIR out=report.json    as JSON; out=report.xml as JUnit
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

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from flows.cli.composed import Composed
from flows.cli.output import folder, inside, no_folder, show
from tasks.core.errors import ConfigError, Finding, PlumblineError
from tasks.core.redaction import redact
from tasks.core.terminal import plain
from tasks.verify.dialects import connect
from tasks.verify.reference import read_reference
from tasks.verify.run import EXIT_STATUS, Report, choose, verify


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    if composed.settings["prefect"]:
        from flows.orchestration.flow_body import run_recorded

        return EXIT_STATUS[run_recorded("verify", composed, words)["verdict"]]
    report = verified(composed.settings)
    show(report, composed.settings["out"])
    return EXIT_STATUS[report.outcome]


def verified(settings: Mapping[str, Any]) -> Report:
    """Find the server, the model and the reference, and run all checks.

    Raises ConfigError with a line for each mistake of the user, those that only the server can tell
    included.
    """
    findings = list(problems(settings))
    wrong, lines = {finding.what for finding in findings}, [str(each) for each in findings]
    source = folder(settings["source"] or ".")
    reference = server = target = None
    if "source" not in wrong:
        try:
            reference = read_reference(source)
        except PlumblineError as error:
            lines.append(_line(f"source={settings['source']}", error))
    if "url" not in wrong:
        options = {key: settings[key] for key in ("timeout_s", "workers")}
        try:
            server = connect(settings["url"], model=settings["name"], **options)
            names = {"model": settings["name"], "base": settings["base"]}
            target = choose(server.models(), source, **names)
        except ConfigError as error:
            lines += error.details or [_line("model", error)]
        except PlumblineError as error:
            lines.append(_line(f"url={redact(settings['url'])}", error))
    if lines or server is None or target is None or reference is None:
        count = f"{len(lines)} problem{'s' * (len(lines) != 1)}"
        raise ConfigError(f"{count}; nothing was verified", details=lines)
    return verify(server, target, reference, settings["profile"])


def problems(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the mistakes that this machine can tell."""
    url, source = settings["url"], settings["source"]
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


def _line(what: str, error: PlumblineError) -> str:
    """Return an error as one line, with what to type."""
    return plain(f"{what}: {error.message}" + (f" -> {error.hint}" if error.hint else ""))
