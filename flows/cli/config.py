"""Compose and check a configuration from Hydra overrides, for the command line and for a worker.

`run_main` runs `rlhf` or `deliver`. Hydra parses the overrides and runs what its own flags ask for,
so `--multirun`, `--cfg job` and `--info` work as usual; help and mistakes are ours. The exit status
is 2 for every error of the configuration or the command line, else that of the job; the worst one
for a sweep.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.cli.composed import Composed, hide_variables_of, report, resolve, run_job
from flows.cli.usage import brief, full
from flows.cli.vocabulary import (
    CONF,
    STEP,
    Problem,
    Vocabulary,
    config_error,
    in_step,
    no_setting,
    unknown_key,
)
from tasks.config.defaults import ONLINE, RULES, default
from tasks.config.sections import Deliver, Rlhf
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.redaction import hide_interpolated, redact, redacted
from tasks.core.terminal import plain, quoted

SCHEMAS: dict[str, type] = {"rlhf": Rlhf, "deliver": Deliver}
"""Dataclass of the settings, by root file."""


def _default(*, _root_: DictConfig, _node_: Node) -> Any:
    """Resolve `${default:}`: compute the default of the key that has this value."""
    return default(_node_._get_full_key(None), partial(_setting, _root_)).value


def _toy(value: Any, *others: Any, _root_: DictConfig, _node_: Node) -> Any:
    """Resolve `${toy:value,other}`: `value` with the embedded model, `other` with any other model.

    If `other` is left out, it is the computed default of the key, or null if there is no rule.
    """
    if _setting(_root_, "model.kind") == "toy":
        return value
    if others:
        return others[0]
    key = _node_._get_full_key(None)
    return default(key, partial(_setting, _root_)).value if key in RULES else None


def _setting(config: DictConfig, key: str) -> Any:
    """Return a setting, or a fact about its base model; the `get` of `tasks/config/defaults.py`."""
    if key in ("model.parameters", "model.context", "model.only_bf16"):
        from tasks.config.checks.model import look_at  # not loaded for a delivery

        model = {name: _setting(config, f"model.{name}") for name in ("kind", "path", "revision")}
        known, _ = look_at(model)
        return getattr(known, key.rpartition(".")[2])
    return OmegaConf.select(config, key)


def _project(name: str) -> str:
    """Resolve `${project:name}`: a file of this project, or of an installed package."""
    for root in (CONF.parent, *map(Path, sys.path)):
        if (root / name).is_file():
            return str(root / name)
    return str(CONF.parent / name)  # the check of the setting reports it


OmegaConf.register_new_resolver("default", _default, replace=True)
OmegaConf.register_new_resolver("project", _project, replace=True)
OmegaConf.register_new_resolver("toy", _toy, replace=True)
for _program, _section in SCHEMAS.items():
    _name = "schema" if _program == "rlhf" else f"{_program}_schema"
    ConfigStore.instance().store(name=_name, node=Vocabulary(_program, _section).defaults)


def compose_config(overrides: Sequence[str], *, config_name: str = "rlhf") -> Composed:
    """Compose and check a configuration; `config_name` is a root file in `conf`.

    Of overrides of single steps (`steps.ppo.train.lr=1e-4`) the names are checked. Raises
    ConfigError with every unknown key, group or option, wrong or missing value, and override that
    cannot be parsed.
    """
    names = vocabulary(config_name, overrides)
    problems = wrong_overrides(overrides, names)
    wrong = {problem.word for problem in problems}
    right = [o for o in split(overrides)[0] if o not in wrong]
    is_rlhf = config_name == "rlhf"
    try:
        config = composed_as_is(right, config_name)
        lines = _take_gguf(config) if is_rlhf else []
    except PlumblineError:
        if problems:  # which say more
            raise config_error(problems) from None
        raise
    composed = resolve(config, names, right, problems)
    lines += _computed(config, composed.settings) if is_rlhf else []
    return replace(composed, defaults=tuple(lines))


def composed_as_is(overrides: Sequence[str], config_name: str) -> DictConfig:
    """Compose a configuration with Hydra alone; mandatory values may be missing.

    Raises ConfigError if Hydra refuses an override or a file.
    """
    try:
        with initialize_config_dir(str(CONF), job_name="rlhf", version_base="1.3"):
            return compose(config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        message, *details = [line.strip() for line in str(error).splitlines() if line.strip()]
        help_ = f"{vocabulary(config_name).command} --help"
        raise ConfigError(message, details=details[:3], hint=help_) from error


def wrong_overrides(overrides: Sequence[str], names: Vocabulary) -> list[Problem]:
    """Return the overrides that Hydra cannot read, and those of unknown settings and options.

    Hydra stops at the first one, and suggests `+key=value` for a typo.
    """
    problems, parser = list[Problem](), OverridesParser.create()
    for text in overrides:
        match = STEP.fullmatch(text)
        step, own = match.groups() if match else ("", text)
        key, _, value = own.lstrip("+~").partition("=")
        try:
            override = parser.parse_override(own)
        except HydraException as error:
            prefix, colon, rest = key.removeprefix("steps.").partition(":")
            if names.has(key):
                hint = f"{key}=\"'{value}'\""
            elif colon and not names.is_section(prefix):
                step, hint = prefix, names.suggest(rest, value)
            else:
                hint = names.suggest(key.replace(":", "."), value)
            message = f"{text}: {str(error).splitlines()[0]}"
            problems.append(Problem(message, in_step(step, hint), text))
            continue
        if override.is_hydra_override() or override.is_delete():
            continue
        if key in names.groups:
            missing = [o for o in value.strip("[]").split(",") if o not in names.groups[key]]
            if missing:
                message = f"{text}: there is no {key} {missing[0]!r}"
                hint = in_step(step, names.choose(key, missing[0]))
                problems.append(Problem(message, hint, text))
        elif not names.has(key):
            problem = unknown_key(key, names, text)
            problems.append(replace(problem, hint=in_step(step, problem.hint)))
    return problems


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides of the run, and those of single steps by the step's name."""
    by_step: dict[str, list[str]] = {}
    for match in filter(None, map(STEP.fullmatch, overrides)):
        by_step.setdefault(match[1], []).append(match[2])
    return [o for o in overrides if not STEP.fullmatch(o)], by_step


def vocabulary(program: str, overrides: Sequence[str] = ()) -> Vocabulary:
    """Return the names that a command line may use: of `conf`, and of its `hydra.searchpath`."""
    added = [o.partition("=")[2] for o in overrides if o.startswith("hydra.searchpath=")]
    paths = [p.strip(" '\"") for value in added for p in value.strip("[]").split(",")]
    own = [Path(p.removeprefix("file://")) for p in paths if p.startswith(("file:", "/"))]
    return Vocabulary(program, SCHEMAS[program], [CONF, *own])


def _take_gguf(config: DictConfig) -> list[str]:
    """Put the Hugging Face folder of a GGUF file into `model.path`. Returns a line about it."""
    path: Any = None
    with suppress(OmegaConfBaseException):  # reported when the rest is resolved
        path = config.model.path
    if not str(path).endswith(".gguf"):
        return []
    from tasks.from_gguf import hf_folder

    config.model.path = str(hf_folder(Path(path).expanduser()))
    return [f"model.path={config.model.path} (the dequantised weights of {path}, in bf16)"]


def _computed(config: DictConfig, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about every default that a rule computed."""
    typed: Any = OmegaConf.to_container(config, resolve=False)
    online = settings["train"]["objective"] in ONLINE
    for key in RULES:
        section, _, name = key.partition(".")
        if section == "rl" or (section == "rollout" and not online):
            continue  # the plan shows the effective values of section rl
        if "${" in str(typed[section][name]):
            chosen = default(key, partial(_setting, config))
            if settings[section][name] == chosen.value:
                yield chosen.line(key)


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
