"""A command line of Hydra's with our exit statuses.

`hydra.main` does the parsing, so that `--multirun`, `--cfg job`, `--info`, `--help` and completion
work as everywhere; what it raises is sorted here. Exit status: 2 when the schema refuses the
configuration, 1 for Hydra's own errors (with its list of options), else the job's. A sweep is
composed wholly before its first job; all its jobs run, and the worst status is returned.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from flows.config import CONF, SCHEMAS, Composed, conf_folders
from flows.config_errors import as_config_error
from flows.overrides import apart
from tasks.errors import PlumblineError

Job = Callable[[Composed, list[str]], int]
_RAISE = "HYDRA_FULL_ERROR"


def run_main(config_name: str, job: Job, *, argv: Sequence[str] | None = None) -> int:
    """Run a job for every configuration that the command line asks for.

    Args:
        config_name: root file in `conf`, without its suffix.
        job: gets the configuration and the overrides that lead to it again; returns a status.
        argv: the command line after the program's name; None takes the process's own.

    Returns:
        the exit status.
    """
    given = _with_search_path(list(sys.argv[1:] if argv is None else argv))
    arguments, for_links = apart(given)
    statuses: list[int] = []

    def task(config: DictConfig) -> None:
        with _environment(_RAISE, None):  # a job's children must not inherit it
            statuses.append(_run(job, config, for_links))

    program = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)
    try:
        with _environment(_RAISE, "1"), _arguments(arguments):
            program()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        root = SCHEMAS[config_name]
        return _report(as_config_error(error, arguments, conf_folders(arguments), root))
    return max(statuses, default=0)


def _run(job: Job, config: DictConfig, for_links: list[str]) -> int:
    overrides = list(HydraConfig.get().overrides.task)
    hydra_overrides = HydraConfig.get().overrides.hydra
    overrides += [o for o in hydra_overrides if o.startswith("hydra.searchpath=")]
    try:
        return job(Composed.of(config), [*overrides, *for_links])
    except PlumblineError as error:
        return _report(error)


def _report(error: Exception) -> int:
    if isinstance(error, PlumblineError):
        print(error.report(), file=sys.stderr)
        return error.exit_code
    print(error, file=sys.stderr)
    if error.__cause__ is not None:
        print(error.__cause__, file=sys.stderr)
    return 1


def _with_search_path(arguments: list[str]) -> list[str]:
    """`--config-dir X` as an override: a worker that gets the overrides then finds X too."""
    kept, folders = [], []
    rest = iter(arguments)
    for argument in rest:
        flag, joined, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            folders.append(Path(value if joined else next(rest, ".")).absolute())
        else:
            kept.append(argument)
    if not folders:
        return kept
    return [*kept, f"hydra.searchpath=[{','.join(f'file://{f}' for f in folders)}]"]


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    _set(name, value)
    try:
        yield
    finally:
        _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before
