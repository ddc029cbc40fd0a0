"""Compose and check a configuration from Hydra overrides, for the command line and for a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.cli.composed import Composed, resolve
from flows.cli.vocabulary import (
    CONF,
    STEP,
    Problem,
    Vocabulary,
    config_error,
    in_step,
    unknown_key,
)
from tasks.config.defaults import ONLINE, RULES, default
from tasks.config.sections import Deliver, Rlhf
from tasks.core.errors import ConfigError, PlumblineError

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
    if key in ("model.parameters", "model.context"):
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
