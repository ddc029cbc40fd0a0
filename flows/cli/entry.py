"""Run a command whose configuration Hydra composes: `rlhf` or `deliver`.

Hydra parses the overrides and runs what its own flags ask for, so `--multirun`, `--cfg job` and
`--info` work as usual; help and mistakes are ours. The exit status is 2 for every error of the
configuration or the command line, else that of the job; the worst one for a sweep.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.cli.composed import Composed, hide_variables_of, report, run_job
from flows.cli.config import compose_config, composed_as_is, split, vocabulary, wrong_overrides
from flows.cli.usage import brief, full
from flows.cli.vocabulary import CONF, Problem, Vocabulary, config_error, no_setting
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.redaction import hide_interpolated, redact, redacted
from tasks.core.terminal import plain, quoted

Job = Callable[[Composed, list[str]], int]
"""(configuration, its overrides) -> exit status."""
_FLAGS = {
    "--multirun": 0, "-m": 0, "--resolve": 0, "--version": 0, "--hydra-help": 0,
    "--cfg": 1, "-c": 1, "--info": 1, "-i": 1, "--package": 1, "-p": 1, "--shell-completion": 1,
    "-sc": 1,
}  # fmt: skip
"""Hydra's flags, and the number of their values."""
_RAISE = "HYDRA_FULL_ERROR"


def run_main(config_name: str, job: Job, *, argv: Sequence[str] | None = None) -> int:
    """Run a job for every configuration of a command line; `--multirun` has several.

    `config_name` is a root file in `conf`, without its suffix; `argv` are the words after the
    program's name, by default those of this process. Returns the exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(brief(vocabulary(config_name)), file=sys.stderr)
        return 2
    try:
        if {"--help", "-h"} & set(words):
            flags, overrides, topics = read(words, vocabulary(config_name), wants_help=True)
            config = composed_as_is(split(overrides)[0], config_name)
            print(full(vocabulary(config_name, overrides), config, topics))
            return 0
        flags, overrides, _ = read(words, vocabulary(config_name))
        runs = _by_hydra(config_name, flags, overrides) if flags else [overrides]
    except PlumblineError as error:
        return report(error)
    return max((_run(config_name, job, overrides) for overrides in runs), default=0)


def _run(config_name: str, job: Job, overrides: list[str]) -> int:
    try:
        composed = compose_config(overrides, config_name=config_name)
    except PlumblineError as error:
        return report(error)
    return run_job(job, composed, overrides)


def read(
    words: Sequence[str], names: Vocabulary, *, wants_help: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """Sort a command line into Hydra's flags with their values, overrides, and topics of help.

    Hydra answers another tool's flag (`--learning_rate 1e-4`) with its usage, and a word without
    `=` with an error of its grammar. Raises ConfigError with all words that are neither.
    """
    flags, overrides, topics, folders = list[str](), list[str](), list[str](), list[str]()
    problems, rest = list[Problem](), list(words)
    while rest:
        word = rest.pop(0)
        flag, joined, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = value if joined else rest.pop(0) if rest else "."
            folders.append(f"file://{Path(folder).absolute()}")
        elif flag in _FLAGS:
            optional = flag in ("--info", "-i") and "=" in "".join(rest[:1])
            count = 0 if joined or optional else _FLAGS[flag]
            flags += [word, *rest[:count]]
            rest = rest[count:]
        elif wants_help and (word in ("--help", "-h") or names.has(word)):
            topics += [] if word.startswith("-") else [word]
        elif word.startswith("-"):
            has_value = not joined and rest and "=" not in rest[0] and not rest[0].startswith("-")
            problems.append(no_setting(word, names, rest.pop(0) if has_value else ""))
        elif names.program == "deliver" and _is_source(word, names, overrides):
            overrides.append(f"source={quoted(word)}")
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            problems.append(no_setting(word, names))
    if problems:
        raise config_error(problems)
    if folders:  # an override, so that a worker that gets the overrides finds the folders too
        overrides.insert(0, f"hydra.searchpath=[{','.join(folders)}]")
    return flags, overrides, topics


def _is_source(word: str, names: Vocabulary, overrides: Sequence[str]) -> bool:
    """Return True for the folder of `deliver DIR`, which may have an equals sign in its name."""
    key = word.partition("=")[0].lstrip("+~")
    if any(o.startswith("source=") for o in overrides):
        return False
    return not (names.has(key) or key in names.groups) and ("=" not in word or Path(word).exists())


def _by_hydra(config_name: str, flags: list[str], overrides: list[str]) -> list[list[str]]:
    """Let Hydra do what its flags ask for. Returns the overrides of every run of a sweep."""
    names = vocabulary(config_name, overrides)
    if problems := wrong_overrides(overrides, names):
        raise config_error(problems)
    of_run, _ = split(overrides)
    of_steps = [o for o in overrides if o not in of_run]
    jobs: list[list[str]] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)
    def note(_: DictConfig) -> None:
        _redact_sweep()
        # Not resolved: Prefect records the overrides as they were typed, with `${oc.env:NAME}`.
        typed: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
        searched = [o for o in typed["hydra"] if o.startswith("hydra.searchpath=")]
        jobs.append([*typed["task"], *searched, *of_steps])

    hide_interpolated(" ".join(overrides))
    with suppress(PlumblineError):  # which Hydra reports below
        hide_variables_of(composed_as_is(of_run, config_name))
    before, os.environ[_RAISE], text = sys.argv, "1", io.StringIO()
    resolve = ["--resolve"] if "job" in flags else []  # computed defaults as numbers
    sys.argv = [sys.argv[0], *of_run, *flags, *resolve]
    try:
        with redirect_stdout(text):
            note()
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise ConfigError(plain(str(error)), hint=f"{names.command} --help") from error
    finally:
        print(redact(text.getvalue()), end="")
        sys.argv = before
        os.environ.pop(_RAISE, None)
    return jobs


def _redact_sweep() -> None:
    """Remove secrets from the file in which Hydra stores the overrides of a sweep."""
    config = HydraConfig.get()
    path = Path(config.sweep.dir) / "multirun.yaml"
    if config.mode == RunMode.MULTIRUN and path.is_file():
        document = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        OmegaConf.save(OmegaConf.create(redacted(document)), path)
