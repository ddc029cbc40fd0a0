"""Compose and check a configuration from Hydra overrides, for the command line and for a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flows.cli.composed import Composed
from flows.cli.problems import (
    WrongValuesError,
    config_error,
    missing_value,
    wrong_overrides,
    wrong_values,
)
from flows.cli.vocabulary import CONF, Vocabulary
from tasks.config import Rlhf
from tasks.config.after_training import Deliver
from tasks.config.checks.model import look
from tasks.config.defaults import ONLINE, RULES, default
from tasks.core.errors import ConfigError

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
        kind = _setting(config, "model.kind")
        known, _ = look(kind, config.model.path, config.model.revision)
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


def resolved(config: DictConfig, overrides: Sequence[str], config_name: str) -> Composed:
    """Check and resolve a configuration that Hydra composed.

    Raises:
        ConfigError: unknown keys, values of a wrong type, a mandatory value is missing, or an
            interpolation names no setting.
    """
    names = vocabulary(config_name, conf_folders(overrides))
    try:
        return _resolved(config, config_name)
    except WrongValuesError as error:
        raise config_error(wrong_values(error, overrides, names)) from error
    except MissingMandatoryValue as error:
        raise missing_value(str(error.full_key), names) from error
    except OmegaConfBaseException as error:
        raise _unexplained(error, names) from error


def _resolved(config: DictConfig, config_name: str) -> Composed:
    dequantised = _take_gguf(config) if config_name == "rlhf" else []
    composed = Composed.of(config, SCHEMAS[config_name])
    if config_name != "rlhf":
        return composed
    return replace(composed, defaults=(*dequantised, *_computed(config, composed.settings)))


def _unexplained(error: Exception, names: Vocabulary) -> ConfigError:
    """Return an error in the words of Hydra or OmegaConf, without its trace of files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ConfigError(" ".join(lines[:2]), hint=f"{names.command} --help")


def _take_gguf(config: DictConfig) -> list[str]:
    """Put the Hugging Face folder of a GGUF file into `model.path`; return what to say of it."""
    path = config.model.path
    if not str(path).endswith(".gguf"):
        return []
    from tasks.from_gguf import hf_folder

    config.model.path = str(hf_folder(Path(path).expanduser()))
    return [f"model.path={config.model.path} (the dequantised weights of {path}, in bf16)"]


def _computed(config: DictConfig, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about every default that a rule computed."""
    typed: Any = OmegaConf.to_container(config, resolve=False)
    for key in RULES:
        section, _, name = key.partition(".")
        online = settings["train"]["objective"] in ONLINE
        if section == "rl" or (section == "rollout" and not online):
            continue  # the plan shows the effective values of section rl
        if "${" in str(typed[section][name]):
            chosen = default(key, partial(_setting, config))
            if settings[section][name] == chosen.value:
                yield chosen.line(key)


def compose_config(overrides: Sequence[str], *, config_name: str = "rlhf") -> Composed:
    """Compose and check a configuration, within `hydra.main` or outside of it.

    Args:
        overrides: words of a command line, e.g. `["+exp=qlora", "train.lr=1e-4"]`.
        config_name: root file in `conf`, without its suffix.

    Raises:
        ConfigError: every unknown key, group or option, wrong value, missing value, and override
            that cannot be parsed.
    """
    names = vocabulary(config_name, conf_folders(overrides))
    problems = list(wrong_overrides(overrides, names))
    right = [o for o in overrides if o not in [problem.word for problem in problems]]
    try:
        config = composed_as_is(right, config_name)
        if not problems:
            return resolved(config, right, config_name)
        _resolved(config, config_name)
    except WrongValuesError as error:
        problems += wrong_values(error, right, names)
    except (OmegaConfBaseException, ConfigError):
        if not problems:
            raise
    raise config_error(problems)


def composed_as_is(overrides: Sequence[str], config_name: str) -> DictConfig:
    """Compose a configuration with Hydra alone; mandatory values may be missing.

    Raises:
        ConfigError: Hydra refuses an override or a file.
    """
    try:
        with own_hydra(), initialize_config_dir(str(CONF), job_name="rlhf", version_base="1.3"):
            return compose(config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _unexplained(error, vocabulary(config_name)) from error


def vocabulary(program: str, folders: Sequence[Path] = (CONF,)) -> Vocabulary:
    """Return the names that a program's command line may use."""
    return Vocabulary(program, SCHEMAS[program], folders)


def conf_folders(overrides: Sequence[str]) -> list[Path]:
    """Return the folders of configuration files: `conf`, and those of `hydra.searchpath=[...]`."""
    added = [o.partition("=")[2] for o in overrides if o.startswith("hydra.searchpath=")]
    paths = [p.strip(" '\"") for value in added for p in value.strip("[]").split(",")]
    return [CONF, *(Path(p.removeprefix("file://")) for p in paths if p.startswith(("file:", "/")))]


@contextmanager
def own_hydra() -> Iterator[None]:
    """Set aside what Hydra holds of the running program, and restore it after the block.

    `Singleton.get_state` would do it too, but copies every schema and searches for plugins again.
    """
    hydra, name = GlobalHydra.instance().hydra, JobRuntime.instance().get("name")
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = hydra
        JobRuntime.instance().set("name", name)
