"""`python flows/audit.py ...`: from a command line to an exit status, without Prefect and torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.cli.config import Composed
from flows.cli.entry import run_main
from flows.cli.memory_limit import bounded_memory
from flows.cli.signals import exit_on_signals
from tasks.audit.repair import repair
from tasks.audit.run import Report, audit
from tasks.core.errors import ConfigError, PlumblineError

PROJECT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Entry of `flows/audit.py`. Returns the exit status."""
    with exit_on_signals():
        return run_main("audit", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    settings = composed.settings
    if settings["fix"] and not settings["out_dir"]:
        raise ConfigError("fix=true writes a new folder: which?", hint="out_dir=<a new folder>")
    if settings["prefect"]:
        return _in_prefect(composed, overrides)
    status = _say(examine(settings), settings["out"])
    if settings["fix"]:
        _tell(repaired(settings))
        return 0
    return status


def repaired(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`fix=true`: a repaired copy in `out_dir`. Returns where it is, its digest, what was done.

    Raises:
        ConfigError, ContractError, ArtifactError: as `tasks.audit.repair.repair` says.
    """
    base, out = settings["base"], _folder(settings["out_dir"])
    with bounded_memory(settings["source"]):
        made = repair(_folder(settings["source"]), out, base=_folder(base) if base else None)
    return {"out_dir": str(out), "digest": made.artifact.digest, "done": list(made.done)}


def _tell(made: Mapping[str, Any]) -> None:
    """What was repaired, beside the report on standard output."""
    lines = [f"\n{made['out_dir']}: repaired, artifact {made['digest'][:12]}", *made["done"]]
    print("\n  ".join(lines), file=sys.stderr)


def examine(settings: Mapping[str, Any]) -> Report:
    """Run the audit that the settings describe; write the report to `out` if it is set.

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
            raise ConfigError(f"{key}={settings[key]}: {what}", hint=f"{key}=<folder>")
    try:
        with bounded_memory(settings["source"]):
            report = audit(
                source,
                base=_folder(base) if base else None,
                values=settings["values"],
                adapter=_adapter(settings),
            )
    except ConfigError:
        raise
    except PlumblineError as error:
        raise ConfigError(error.message, details=error.details, hint="source=<folder>") from error
    if out not in (None, "-"):
        _write(_folder(out), report)
    return report


def _say(report: Report, out: str | None) -> int:
    """Print the report, or where it is. Returns the exit status."""
    if out == "-":
        print(json.dumps(report.as_json(), indent=1))
    elif out:
        print(f"{report.source}: {report.what}; {report.counts}; {out}")
    else:
        print(report.text())
    return 0 if report.ok else 1


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"out={path}: {error.strerror}", hint="out=<a file elsewhere>") from error


def _in_prefect(composed: Composed, overrides: list[str]) -> int:
    bootstrap(PROJECT, composed.runs)
    from flows.cli.lock import hold
    from flows.orchestration.prefect_server import prefect_server
    from flows.orchestration.warm_up import warm_up

    settings, meanwhile = composed.settings, partial(warm_up, composed, "flows.audit")
    wait_s = settings["paths"]["wait_s"]
    with hold(composed.runs, wait_s), prefect_server(composed.runs, meanwhile=meanwhile):
        from flows.audit import audit as flow

        state = flow(overrides, tag=settings["tag"] or "manual", return_state=True)
        found = state.result(raise_on_failure=False)
    if isinstance(found, BaseException):
        raise found
    made, out = found.pop("repaired", None), settings["out"]
    told = f"{found['source']}: {found['what']}; {out}"
    print(json.dumps(found, indent=1) if out in (None, "-") else told)
    if made is not None:
        _tell(made)
    return 0 if found["ok"] or made is not None else 1


def _adapter(settings: Mapping[str, Any]) -> Path | None:
    """The folder of adapter=; None where it is not given. Raises ConfigError."""
    text = settings["adapter"]
    if not text:
        return None
    if not (settings["base"] and settings["values"]):
        raise ConfigError(
            f"adapter={text} is compared with the base's values, which are not read",
            hint="base=<folder of the base> values=true",
        )
    if not (_folder(text) / "adapter_config.json").is_file():
        raise ConfigError(
            f"adapter={text}: no adapter_config.json in it", hint="adapter=<folder of the adapter>"
        )
    return _folder(text)


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()
