"""Find what is wrong with a checkpoint, whatever tool made it.

    python flows/audit.py DIR                        headers and documents: seconds
    python flows/audit.py DIR base=DIR               an adapter or a merge against its base
    python flows/audit.py DIR values=true            tensor data too, at the disk's speed
    python flows/audit.py MERGED base=DIR adapter=DIR values=true    check every merged tensor
    python flows/audit.py DIR out=report.json        the report as JSON; out=- prints it
    python flows/audit.py DIR fix=true out_dir=NEW   a repaired copy, if that loses no data
    python flows/audit.py DIR verify=key.pub         every byte against its signature
    python flows/audit.py DIR prefect=true           recorded: a flow run, an MLflow run

DIR is short for `source=DIR`. Works from any directory; writes nothing into DIR, runs nothing from
it and unpickles nothing. Exit status: 0 no error was found (or all are repaired), 1 errors, 2 DIR
cannot be read or repaired, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The project's root replaces flows/ on the path: modules in flows/ would shadow libraries.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "audit")

import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flows.cli.composed import Composed
from tasks.audit.repair import repair
from tasks.audit.run import Report, audit
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.files import meant
from tasks.core.private import open_up
from tasks.core.terminal import json_text, plain, typed
from tasks.pipeline.signature import key_file

MAX_MEMORY = 16 << 30
"""Bytes of address space for reading a folder that may be hostile, whatever its files say."""


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    settings = composed.settings
    if settings["fix"] and not settings["out_dir"]:
        raise ConfigError(
            "fix=true writes a new folder, and out_dir is not set", hint="out_dir=<a new folder>"
        )
    if settings["prefect"]:
        return _in_prefect(composed, words)
    status = _print_report(examine(settings), settings["out"])
    if settings["fix"]:
        _print_repair(repaired(settings))
        return 0
    return status


def repaired(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write a repaired copy to `out_dir` (`fix=true`).

    Returns:
        `out_dir`, the `digest` of the copy, and the list of repairs as `done`.

    Raises:
        ConfigError, ContractError, ArtifactError: as in `tasks.audit.repair.repair`.
    """
    base, out = settings["base"], _folder(settings["out_dir"])
    with bounded_memory(settings["source"]):
        made = repair(_folder(settings["source"]), out, base=_folder(base) if base else None)
    return {"out_dir": str(out), "digest": made.artifact.digest, "done": list(made.done)}


def _print_repair(repairs: Mapping[str, Any]) -> None:
    """Print the repairs to standard error; the report is on standard output."""
    lines = [
        f"\n{repairs['out_dir']}: repaired, artifact {repairs['digest'][:12]}",
        *repairs["done"],
    ]
    print(plain("\n  ".join(lines)), file=sys.stderr)


def examine(settings: Mapping[str, Any]) -> Report:
    """Run an audit, and write the report to `out` if it is set.

    Raises:
        ConfigError: a folder cannot be read, or `out` lies inside it.
    """
    source, base = _folder(settings["source"]), settings["base"]
    out = settings["out"]
    if out not in (None, "-") and _folder(out).resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            f"out={out} lies in source={source}, which is only read", hint="out=<a file elsewhere>"
        )
    for key in ("source", "base"):
        if settings[key] and not _folder(settings[key]).is_dir():
            what = "is a file" if _folder(settings[key]).is_file() else "no such folder"
            hint = typed(key, meant(_folder(settings[key])) or "<folder>")
            raise ConfigError(f"{key}={settings[key]}: {what}", hint=hint)
    if settings["verify"]:
        from tasks.config.checks import preflight
        from tasks.config.checks.release import public_key

        preflight(list(public_key("verify", settings["verify"])))
    try:
        with bounded_memory(settings["source"]):
            report = audit(
                source,
                base=_folder(base) if base else None,
                values=settings["values"],
                adapter=_adapter(settings),
                public_key=key_file(settings["verify"]),
            )
    except ConfigError:
        raise
    except PlumblineError as error:
        raise ConfigError(error.message, details=error.details, hint="source=<folder>") from error
    if out not in (None, "-"):
        _write(_folder(out), report)
    return report


def _print_report(report: Report, out: str | None) -> int:
    """Print the report, or one line with its file. Returns the exit status."""
    if out == "-":
        print(json_text(report.as_json()))
    elif out:
        print(plain(f"{report.source}: {report.what}; {report.counts}; {out}"))
    else:
        print(report.text())
    return 0 if report.ok else 1


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(json_text(report.as_json()) + "\n")
        open_up(path)
    except OSError as error:
        raise ConfigError(f"out={path}: {error.strerror}", hint="out=<a file elsewhere>") from error


def _in_prefect(composed: Composed, words: list[str]) -> int:
    from flows.orchestration.flow_body import run_recorded

    document = run_recorded("audit", composed, words)
    repairs, out = document.pop("repaired", None), composed.settings["out"]
    line = f"{document['source']}: {document['what']}; {out}"
    print(json.dumps(document, indent=1) if out in (None, "-") else plain(line))
    if repairs is not None:
        _print_repair(repairs)
    return 0 if document["ok"] or repairs is not None else 1


def _adapter(settings: Mapping[str, Any]) -> Path | None:
    """Return the folder of `adapter=`; None if it is not set. Raises ConfigError."""
    text = settings["adapter"]
    if not text:
        return None
    if not settings["base"] or settings["values"] is False:
        raise ConfigError(
            f"adapter={text} is compared with the base's values, which are not read",
            hint="base=<folder of the base> values=true",
        )
    if not (_folder(text) / "adapter_config.json").is_file():
        raise ConfigError(
            f"adapter={text}: no adapter_config.json in it", hint="adapter=<folder of the adapter>"
        )
    return _folder(text)


@contextmanager
def bounded_memory(source: str) -> Iterator[None]:
    """Limit the address space of this process to `MAX_MEMORY` bytes more than it has now.

    A lower limit of the system stays in force. Child processes inherit the limit, so code that uses
    CUDA must not run here: CUDA maps more than that.

    Raises:
        ConfigError: the process needed more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [_address_space() + MAX_MEMORY, soft, hard]
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


def _address_space() -> int:
    """Return the bytes of address space that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()
