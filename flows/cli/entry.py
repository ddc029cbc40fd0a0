"""A command line of Hydra's with our help, errors and exit statuses.

`hydra.main` does the parsing, so that `--multirun`, `--cfg job`, `--info` and completion work as
everywhere. Exit status: 2 for every error of the configuration or the command line, else the job's.
A sweep is composed wholly before its first job; all its jobs run, and the worst status is returned.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from flows.cli.arguments import Arguments, read
from flows.cli.config import CONF, Composed, conf_folders, refused, vocabulary
from flows.cli.usage import brief, full
from tasks.core.errors import PlumblineError
from tasks.pipeline.tracking import redact

Job = Callable[[Composed, list[str]], int]
_RAISE = "HYDRA_FULL_ERROR"
_TRACKING = "MLFLOW_TRACKING_URI"


def run_main(config_name: str, job: Job, *, argv: Sequence[str] | None = None) -> int:
    """Run a job for every configuration that the command line asks for.

    Args:
        config_name: root file in `conf`, without its suffix.
        job: gets the configuration and the overrides that lead to it again; returns a status.
        argv: the command line after the program's name; None takes the process's own.

    Returns:
        the exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(brief(config_name), file=sys.stderr)
        return 2
    try:
        arguments = read(words, vocabulary(config_name, conf_folders(words)))
        if arguments.help:
            print(full(config_name, arguments.overrides, arguments.topics))
            return 0
    except PlumblineError as error:
        return _report(error)
    return _hydra(config_name, job, arguments)


def _hydra(config_name: str, job: Job, arguments: Arguments) -> int:
    """Compose with Hydra and run the job for every configuration. Returns the exit status."""
    statuses: list[int] = []
    started = False

    def task(config: DictConfig) -> None:
        nonlocal started
        started = True
        with _environment(_RAISE, None):  # a job's children must not inherit it
            statuses.append(_run(job, config, arguments.for_links))

    program = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)
    shown = {("--cfg", "job"), ("-c", "job")} & set(pairwise(arguments.flags))
    # Computed defaults are shown as numbers.
    words = [*arguments.flags, *arguments.overrides, *(["--resolve"] if shown else [])]
    uri = os.environ.get(_TRACKING)
    printable = redact(uri) if shown and uri else uri
    try:
        with _environment(_RAISE, "1"), _environment(_TRACKING, printable), _arguments(words):
            program()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if not started:
            return _report(refused(error, words, config_name))
        print(error, file=sys.stderr)
        return 1
    return max(statuses, default=0)


def _run(job: Job, config: DictConfig, for_links: list[str]) -> int:
    overrides = list(HydraConfig.get().overrides.task)
    hydra_overrides = HydraConfig.get().overrides.hydra
    overrides += [o for o in hydra_overrides if o.startswith("hydra.searchpath=")]
    try:
        return job(Composed.of(config), [*overrides, *for_links])
    except PlumblineError as error:
        return _report(error)


def _report(error: PlumblineError) -> int:
    print(error.report(), file=sys.stderr)
    return error.exit_code


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
