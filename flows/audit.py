"""Find what is wrong with a checkpoint, whatever tool made it.

    python flows/audit.py DIR                        headers and documents: seconds
    python flows/audit.py DIR base=DIR               an adapter or a merge against its base
    python flows/audit.py DIR values=true            tensor data too, at the disk's speed
    python flows/audit.py MERGED base=DIR adapter=DIR values=true    check every merged tensor
    python flows/audit.py DIR out=report.json        as JSON; .xml as JUnit, .md as Markdown
    python flows/audit.py DIR fix=true out_dir=NEW   a repaired copy, if that loses no data
    python flows/audit.py DIR prefect=true           recorded: a flow run, an MLflow run

DIR is short for `source=DIR`. Works from any directory; writes nothing into DIR, runs nothing from
it and unpickles nothing. Exit status: 0 no error was found (or all are repaired), 1 errors, 2 DIR
cannot be read or repaired, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "audit")

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flows.cli.composed import Composed
from flows.cli.output import folder, inside, no_folder, show
from tasks.audit.run import Report, audit
from tasks.core.errors import ConfigError, Finding, PlumblineError, preflight
from tasks.core.terminal import plain

MAX_MEMORY = 16 << 30
"""Bytes of address space for reading a folder that may be hostile, whatever its files say."""


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    settings = composed.settings
    if settings["fix"] and not settings["out_dir"]:
        raise ConfigError("fix=true writes a new folder", hint="out_dir=<a new folder>")
    if settings["prefect"]:
        from flows.orchestration.flow_body import run_recorded

        ok = run_recorded("audit", composed, words)["ok"]
    else:
        report = examine(settings)
        show(report, settings["out"])
        ok = report.ok
    if settings["fix"]:
        _repair(settings)
    return 0 if ok or settings["fix"] else 1


def _repair(settings: Mapping[str, Any]) -> None:
    """Write a repaired copy to `out_dir`, and print what was done."""
    from tasks.audit.repair import repair

    base, out = settings["base"], folder(settings["out_dir"])
    with bounded_memory(settings["source"]):
        made = repair(folder(settings["source"]), out, base=folder(base) if base else None)
    place = f"\n{out}: repaired, artifact {made.digest[:12]}"
    done = made.manifest()["notes"]["repaired"]
    print(plain("\n  ".join([place, *done])), file=sys.stderr)  # stdout has the report


def examine(settings: Mapping[str, Any]) -> Report:
    """Run an audit. Raises ConfigError if a folder cannot be read, or `out` lies inside it."""
    preflight(list(_problems(settings)))
    base, adapter = settings["base"], settings["adapter"]
    try:
        with bounded_memory(settings["source"]):
            return audit(
                folder(settings["source"]),
                base=folder(base) if base else None,
                values=settings["values"],
                adapter=folder(adapter) if adapter else None,
            )
    except ConfigError:
        raise
    except PlumblineError as error:
        raise ConfigError(error.message, details=error.details, hint="source=<folder>") from error


def _problems(settings: Mapping[str, Any]) -> Iterator[Finding]:
    for key in ("source", "base", "adapter"):
        yield from no_folder(key, settings[key]) if settings[key] else ()
    yield from inside(settings, "source")
    if adapter := settings["adapter"]:
        if not settings["base"] or settings["values"] is False:
            allowed = "it is compared with the base's values, which are not read"
            yield Finding("adapter", adapter, allowed, "base=<folder of the base> values=true")
        elif not (folder(adapter) / "adapter_config.json").is_file():
            yield Finding("adapter", adapter, "no adapter_config.json", "adapter=<its folder>")


@contextmanager
def bounded_memory(source: str) -> Iterator[None]:
    """Limit the address space of this process to `MAX_MEMORY` bytes more than it has now.

    A lower limit of the system stays in force. Child processes inherit the limit, so code that uses
    CUDA must not run here: CUDA maps more than that. Raises ConfigError if it needed more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # of its address space
    bounds = [pages * resource.getpagesize() + MAX_MEMORY, soft, hard]
    limit = min(bound for bound in bounds if bound != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError as error:
        raise ConfigError(
            f"source={source}: needs more than {limit / 2**30:.1f} GiB to be looked at",
            hint="look at what the largest .json and .bin files in it are",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
