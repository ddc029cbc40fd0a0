"""Run a Hydra command line with our help, errors, signals and exit statuses.

`hydra.main` parses the overrides, so `--multirun`, `--cfg job`, `--info` and completion work as
usual. The exit status is 2 for every error of the configuration or the command line, else that of
the job. All jobs of a sweep run, and the worst status is returned.
"""

from __future__ import annotations

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

from flows.cli.arguments import Arguments, read
from flows.cli.composed import Composed, hide_variables_of, report, run_job
from flows.cli.config import (
    compose_config,
    composed_as_is,
    conf_folders,
    resolved,
    vocabulary,
)
from flows.cli.problems import config_error, wrong_overrides
from flows.cli.usage import brief, full
from flows.cli.vocabulary import CONF
from tasks.core.errors import PlumblineError
from tasks.core.redaction import hide_interpolated, redact, redacted
from tasks.core.terminal import plain

Job = Callable[[Composed, list[str]], int]
_RAISE = "HYDRA_FULL_ERROR"
_PRINTS = ("--cfg", "-c", "--info", "-i")
"""Hydra's flags that print a configuration, which has passwords."""


def run_main(config_name: str, job: Job, *, argv: Sequence[str] | None = None) -> int:
    """Run a job for every configuration of a command line; `--multirun` has several.

    Args:
        config_name: root file in `conf`, without its suffix.
        job: gets the configuration and its overrides; returns an exit status.
        argv: the command line after the program's name; None for that of this process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(brief(vocabulary(config_name)), file=sys.stderr)
        return 2
    try:
        arguments = read(words, vocabulary(config_name))
        names = vocabulary(config_name, conf_folders(arguments.overrides))
        if arguments.help:
            print(full(names, composed_as_is(arguments.overrides, config_name), arguments.topics))
            return 0
        sweep = "--multirun" in words or "-m" in words
        if problems := list(wrong_overrides(arguments.overrides, names, sweep=sweep)):
            if not sweep:
                compose_config(arguments.overrides, config_name=config_name)  # wrong values, too
            raise config_error(problems)
    except PlumblineError as error:
        return report(error)
    return _hydra(config_name, job, arguments)


def _hydra(config_name: str, job: Job, arguments: Arguments) -> int:
    """Compose with Hydra and run the job for every configuration. Returns the exit status."""
    statuses: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)
    def task(config: DictConfig) -> None:
        os.environ.pop(_RAISE, None)  # child processes of the job must not inherit it
        _redact_sweep()
        statuses.append(_run(config_name, job, config, arguments.for_steps))
        os.environ[_RAISE] = "1"

    hide_interpolated(" ".join([*arguments.overrides, *arguments.for_steps]))
    shown = {("--cfg", "job"), ("-c", "job")} & set(pairwise(arguments.flags))
    # `--resolve` shows computed defaults as numbers.
    words = [*arguments.overrides, *arguments.flags, *(["--resolve"] if shown else [])]
    prints = any(flag.partition("=")[0] in _PRINTS for flag in arguments.flags)
    if prints:
        with suppress(PlumblineError):  # which Hydra reports below
            hide_variables_of(composed_as_is(arguments.overrides, config_name))
    before, os.environ[_RAISE], sys.argv = sys.argv, "1", [sys.argv[0], *words]
    try:
        with _cleaned() if prints else nullcontext():
            task()
    except (HydraException, OmegaConfBaseException, OSError) as error:
        print(plain(str(error)), file=sys.stderr)
        return 1 if statuses else 2
    finally:
        sys.argv = before
        os.environ.pop(_RAISE, None)
    return max(statuses, default=0)


def _run(config_name: str, job: Job, config: DictConfig, for_steps: list[str]) -> int:
    # Not resolved: Prefect records the overrides as they were typed, with `${oc.env:NAME}`.
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
    overrides, hydra_overrides = list(typed["task"]), typed["hydra"]
    overrides += [o for o in hydra_overrides if o.startswith("hydra.searchpath=")]
    try:
        composed = resolved(config, overrides, config_name)
    except PlumblineError as error:
        return report(error)
    return run_job(job, composed, [*overrides, *for_steps])


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
