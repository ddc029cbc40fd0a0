"""Run a Hydra command line with our help, errors, signals and exit statuses.

`hydra.main` parses the overrides, so `--multirun`, `--cfg job`, `--info` and completion work as
usual. The exit status is 2 for every error of the configuration or the command line, else that of
the job. A sweep composes all its configurations before its first job; all jobs run, and the worst
status is returned.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.cli.arguments import Arguments, read, repeated
from flows.cli.composed import Composed, hide_variables_of
from flows.cli.config import (
    composed_as_is,
    conf_folders,
    refused,
    resolved,
    vocabulary,
)
from flows.cli.usage import brief, full
from flows.cli.vocabulary import CONF
from tasks.core.disk import has_no_space, is_full, write_refused
from tasks.core.errors import PlumblineError
from tasks.core.redaction import hide_interpolated, redact, redacted
from tasks.core.terminal import plain, to_stderr

Job = Callable[[Composed, list[str]], int]
_RAISE = "HYDRA_FULL_ERROR"
_PRINTS = ("--cfg", "-c", "--info", "-i")
"""Hydra's flags that print a configuration, which has passwords."""


def run_main(
    config_name: str, job: Job, *, argv: Sequence[str] | None = None, bare: bool = False
) -> int:
    """Run a job for every configuration of a command line; `--multirun` has several.

    Args:
        config_name: root file in `conf`, without its suffix.
        job: gets the configuration and its overrides; returns an exit status.
        argv: the command line after the program's name; None for that of this process.
        bare: True for a command that needs no arguments; others print a short help without them.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words and not bare:
        print(brief(vocabulary(config_name)), file=sys.stderr)
        return 2
    try:
        arguments = read(words, vocabulary(config_name, conf_folders(words)))
        if arguments.help:
            names = vocabulary(config_name, conf_folders(arguments.overrides))
            print(full(names, composed_as_is(arguments.overrides, config_name), arguments.topics))
            return 0
    except PlumblineError as error:
        return _report(error)
    for key in repeated([*arguments.overrides, *arguments.for_steps]):
        to_stderr(f"warning: {key} is set twice; the last value is taken")
    return _hydra(config_name, job, arguments)


def _hydra(config_name: str, job: Job, arguments: Arguments) -> int:
    """Compose with Hydra and run the job for every configuration. Returns the exit status."""
    statuses: list[int] = []
    started = False

    def task(config: DictConfig) -> None:
        nonlocal started
        started = True
        _redact_sweep()
        with _environment(_RAISE, None):  # child processes of the job must not inherit it
            statuses.append(_run(job, config, arguments.for_steps))

    program = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(task)
    hide_interpolated(" ".join([*arguments.overrides, *arguments.for_steps]))
    shown = {("--cfg", "job"), ("-c", "job")} & set(pairwise(arguments.flags))
    # `--resolve` shows computed defaults as numbers.
    words = [*arguments.flags, *arguments.overrides, *(["--resolve"] if shown else [])]
    prints = any(flag.partition("=")[0] in _PRINTS for flag in arguments.flags)
    if prints:
        with suppress(PlumblineError):  # which Hydra reports below
            hide_variables_of(composed_as_is(arguments.overrides, config_name))
    try:
        with _environment(_RAISE, "1"), _arguments(words), _cleaned() if prints else nullcontext():
            program()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if not started:
            return _report(refused(error, words, config_name))
        print(plain(str(error)), file=sys.stderr)
        return 1
    return max(statuses, default=0)


def _run(job: Job, config: DictConfig, for_steps: list[str]) -> int:
    # Not resolved: Prefect records the overrides as they were typed, with `${oc.env:NAME}`.
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
    overrides, hydra_overrides = list(typed["task"]), typed["hydra"]
    overrides += [o for o in hydra_overrides if o.startswith("hydra.searchpath=")]
    runs = Path()
    try:
        composed = resolved(config)
        runs = composed.runs
        return job(composed, [*overrides, *for_steps])
    except PlumblineError as error:
        return _report(error)
    except Exception as error:
        # The databases of Prefect and MLflow hide a full disk behind errors of their own.
        if not (is_full(error) or has_no_space(runs)):
            raise
        return _report(write_refused(runs, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


def _report(error: PlumblineError) -> int:
    print(plain(error.report()), file=sys.stderr)
    return error.exit_code


@contextmanager
def _cleaned() -> Iterator[None]:
    """Print what the block prints, without secrets."""
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            yield
    finally:
        print(redact(text.getvalue()), end="")


def _redact_sweep() -> None:
    """Remove secrets from the file in which Hydra stores the overrides of a sweep."""
    config = HydraConfig.get()
    path = Path(config.sweep.dir) / "multirun.yaml"
    if config.mode == RunMode.MULTIRUN and path.is_file():
        document = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        OmegaConf.save(OmegaConf.create(redacted(document)), path)


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
