"""Runs of Prefect deployments: they wait for their turn, and name only what the worker allows.

Whoever may start a run in Prefect's page types its overrides. On a terminal the same words are the
user's own, and nothing is limited. Two variables of the worker's environment, lists of folders
separated by ":", say what a deployment's run may name:

    PLUMBLINE_DEPLOY_FOLDERS  paths.runs, out, out_dir, train.resume, register.sign,
                              tracking.prometheus, a tracking.uri that is a file;
                              default: PLUMBLINE_RUNS, or runs
    PLUMBLINE_DEPLOY_CODE     reward.function, eval.function, rl.environment, files of
                              eval.lm_eval, hydra.searchpath,
                              models with trust_remote_code; default: none

Two more are lists separated by blanks:

    PLUMBLINE_DEPLOY_SERVERS  url; default: those of this machine. They get the API key.
    PLUMBLINE_DEPLOY_REPOS    push; default: none. The worker's token of the Hub writes there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.cli.arguments import split
from flows.cli.config import conf_folders
from tasks.core.errors import ConfigError, first_and_more
from tasks.core.redaction import redact
from tasks.lm_eval import is_file
from tasks.pipeline.locks import Patience, hold

FOLDERS, CODE = "PLUMBLINE_DEPLOY_FOLDERS", "PLUMBLINE_DEPLOY_CODE"
SERVERS, REPOS = "PLUMBLINE_DEPLOY_SERVERS", "PLUMBLINE_DEPLOY_REPOS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def in_deployment() -> bool:
    """Return True within a flow run that a worker started for a deployment."""
    from prefect.runtime import flow_run

    return _has_deployment(str(flow_run.id))


@cache
def _has_deployment(flow_run_id: str) -> bool:
    """Ask once: every question is a request to the server."""
    from prefect.runtime import deployment

    return deployment.id is not None


@contextlib.contextmanager
def hold_runs(runs: Path, wait_s: float | None) -> Iterator[Patience]:
    """Enter the folder of runs within a flow; yields how long the run waits for others.

    Args:
        runs: `paths.runs`.
        wait_s: `paths.wait_s`, for a run on a terminal; a deployment's run waits as long as it
            takes.

    Raises:
        BusyError: another process has the folder alone, still after `wait_s` seconds.
    """
    from prefect import get_run_logger

    patience = Patience(None if in_deployment() else wait_s, get_run_logger().info)
    with hold(runs, patience) as held:
        held.share()
        yield patience


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse Hydra's own settings in a deployment's run, before anything is composed.

    Raises:
        ConfigError: an override of `hydra`, other than `hydra.searchpath` of allowed folders.
    """
    if not in_deployment():
        return
    plain, by_step = split(overrides)
    words = [*plain, *(word for own in by_step.values() for word in own)]
    _refuse([problem for word in words for problem in _override_problems(word)])


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse a deployment's run that names other folders or code than the worker allows.

    Args:
        settings: a resolved configuration of any command.

    Raises:
        ConfigError: lists every such setting.
    """
    if in_deployment():
        _refuse(list(_setting_problems(settings)))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(
            f"not allowed in a deployment: {first_and_more(problems)}",
            details=problems,
            hint=f"name an allowed folder, or add one for the worker: make up {FOLDERS}=<folder> "
            f"{CODE}=<folder>; a run on a terminal is not limited",
        )


def _override_problems(override: str) -> Iterator[str]:
    key, _, value = override.lstrip("+~").partition("=")
    if key.partition("@")[0].replace("/", ".").partition(".")[0] != "hydra":
        return
    if not override.startswith("hydra.searchpath=") or "${" in value:
        yield f"{override}: Hydra's own settings"
        return
    named = [part for part in value.strip("[]").split(",") if part.strip()]
    folders = conf_folders([override])[1:]  # without those in packages
    if len(folders) < len(named) or not all(_inside(folder, CODE) for folder in folders):
        yield f"{override}: a folder outside of {CODE}={_listed(CODE)}"


def _setting_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    written = {
        "paths.runs": settings["paths"]["runs"],
        "out": settings.get("out") if settings.get("out") != "-" else None,
        "out_dir": settings.get("out_dir"),
    }
    resume = settings.get("train", {}).get("resume", "auto")
    written["register.sign"] = settings.get("register", {}).get("sign")
    written["train.resume"] = None if resume in ("auto", "never") else resume
    written["tracking.prometheus"] = settings["tracking"]["prometheus"]
    written["tracking.uri"] = _file_of(settings["tracking"]["uri"])
    for key, path in written.items():
        if path is not None and not _inside(path, FOLDERS):
            yield f"{key}={path}: outside of {FOLDERS}={_listed(FOLDERS)}"
    if (url := settings.get("url")) and not _may_be_asked(url):
        yield f"url={redact(url)}: not in {SERVERS}={os.environ.get(SERVERS) or 'this machine'}"
    repo, repos = settings.get("push"), os.environ.get(REPOS, "").split()
    if repo and repo not in repos:
        yield f"push={repo}: not in {REPOS}={' '.join(repos) or 'none'}"
    for key, path in _code(settings):
        if not _inside(path, CODE):
            yield f"{key}={path}: outside of {CODE}={_listed(CODE)}"


def _code(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings whose files are run as code, with their paths."""
    for section in ("reward", "eval"):
        function = settings.get(section, {}).get("function")
        if function and function != "exact_match":
            yield f"{section}.function", function.rpartition(":")[0]
    environment = settings.get("rl", {}).get("environment")
    if environment and environment != "calculator":
        yield "rl.environment", environment.rpartition(":")[0]
    for task in filter(is_file, settings.get("eval", {}).get("lm_eval", ())):
        yield "eval.lm_eval", task  # a task in YAML may name functions
    model = settings.get("model", {})
    if model.get("trust_remote_code"):
        yield "model.trust_remote_code=true with model.path", str(model["path"])


def _may_be_asked(url: str) -> bool:
    """Return True if a deployment's run may send requests to a server."""
    allowed = os.environ.get(SERVERS, "").split()
    return _origin(url) in map(_origin, allowed) if allowed else urlsplit(url).hostname in LOOPBACK


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _file_of(uri: str | None) -> str | None:
    """Return the path of a tracking URI that is a file; None for a server."""
    if uri is None:
        return None
    scheme, colon, path = uri.partition("://")
    if not colon:
        return uri.removeprefix("file:")
    dialect = scheme.partition("+")[0]
    if dialect == "sqlite":
        return path.removeprefix("/")  # of an absolute path, a second slash is left
    return path if dialect == "file" else None


def _inside(path: str | Path, variable: str) -> bool:
    """Return True if a path, with its links followed, lies in one of the allowed folders."""
    real = Path(path).expanduser().resolve()
    return any(real.is_relative_to(Path(folder).resolve()) for folder in _allowed(variable))


def _allowed(variable: str) -> list[str]:
    default = "" if variable == CODE else os.environ.get("PLUMBLINE_RUNS") or "runs"
    text = os.environ.get(variable) or default
    return [str(Path(folder).expanduser()) for folder in text.split(os.pathsep) if folder]


def _listed(variable: str) -> str:
    return os.pathsep.join(_allowed(variable)) or "none"
