"""Compose and check a configuration from Hydra overrides, for the command line and for a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
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
from flows.cli.config_errors import as_config_error, refuse_unknown
from flows.cli.problems import missing_value
from flows.cli.vocabulary import CONF, Vocabulary
from tasks.config import Rlhf
from tasks.config.after_training import Deliver
from tasks.config.checks.model import look
from tasks.config.defaults import ONLINE, RULES, default
from tasks.config.section import hydra_schema
from tasks.core.errors import ConfigError
from tasks.core.redaction import with_passwords

SCHEMAS: dict[str, type] = {
    "rlhf": hydra_schema(Rlhf),
    "deliver": hydra_schema(Deliver),
}
"""Dataclass of the settings, by root file; Hydra checks against it."""


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
    value = OmegaConf.select(config, key)
    return value.name if isinstance(value, Enum) else value


def _project(name: str) -> str:
    """Resolve `${project:name}`: a file of this project, or of an installed package."""
    for root in (CONF.parent, *map(Path, sys.path)):
        if (root / name).is_file():
            return str(root / name)
    return str(CONF.parent / name)  # the check of the setting reports it


OmegaConf.register_new_resolver("default", _default, replace=True)
OmegaConf.register_new_resolver("project", _project, replace=True)
OmegaConf.register_new_resolver("toy", _toy, replace=True)
for _program, _schema in SCHEMAS.items():
    _name = "schema" if _program == "rlhf" else f"{_program}_schema"
    ConfigStore.instance().store(name=_name, node=_schema)


def resolved(config: DictConfig) -> Composed:
    """Check and resolve a configuration that Hydra composed.

    Raises:
        ConfigError: a `+key` is unknown, a mandatory value is missing, or an interpolation names
            no setting.
    """
    root = OmegaConf.get_type(config)
    program = next(name for name, schema in SCHEMAS.items() if schema is root)
    names = vocabulary(program)
    try:
        refuse_unknown(config, names)
        dequantised = _take_gguf(config) if program == "rlhf" else []
        composed = Composed.of(config)
    except MissingMandatoryValue as error:
        raise missing_value(error, names) from error
    except OmegaConfBaseException as error:
        raise as_config_error(error, (), names) from error
    if program != "rlhf":
        return composed
    return replace(composed, defaults=(*dequantised, *_computed(config, composed.settings)))


def _take_gguf(config: DictConfig) -> list[str]:
    """Put the Hugging Face folder of a GGUF file into `model.path`; return what to say of it."""
    path = config.model.path
    if not (path and path.endswith(".gguf")):
        return []
    from tasks.from_gguf import hf_folder

    config.model.path = str(hf_folder(Path(path).expanduser()))
    return [f"model.path={config.model.path} (the dequantised weights of {path}, in bf16)"]


def _computed(config: DictConfig, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about every default that a rule computed."""
    online = settings["train"]["objective"] in ONLINE
    for key in RULES:
        section, _, name = key.partition(".")
        if section == "rl" or (section == "rollout" and not online):
            continue  # the plan shows the effective values of section rl
        written = config[section]._get_node(name)._value()
        if not (isinstance(written, str) and "${" in written):
            continue
        chosen = default(key, partial(_setting, config))
        if settings[section][name] == chosen.value:
            yield chosen.line(key)


def compose_config(
    overrides: Sequence[str], *, config_name: str = "rlhf", conf: Path = CONF
) -> Composed:
    """Compose and check a configuration, within `hydra.main` or outside of it.

    Args:
        overrides: words of a command line, e.g. `["+exp=qlora", "train.lr=1e-4"]`.
        config_name: root file in `conf`, without its suffix.

    Raises:
        ConfigError: an unknown key, group or option, a wrong type, a missing value, an override
            that cannot be parsed.
    """
    overrides = with_passwords(overrides)
    try:
        return resolved(_compose(overrides, config_name, conf))
    except (HydraException, OmegaConfBaseException) as error:
        raise refused(error, overrides, config_name, conf=conf) from error


def composed_as_is(overrides: Sequence[str], config_name: str) -> DictConfig:
    """Compose a configuration for `--help`, in which mandatory values may be missing.

    Raises:
        ConfigError: as in `compose_config`, except for missing values.
    """
    try:
        return _compose(overrides, config_name, CONF)
    except (HydraException, OmegaConfBaseException) as error:
        raise refused(error, overrides, config_name) from error


def refused(
    error: Exception, overrides: Sequence[str], config_name: str, *, conf: Path = CONF
) -> ConfigError:
    """Return an error with a suggestion, in place of the one that Hydra raised.

    Args:
        config_name: root file in `conf`, without its suffix.
    """
    names = vocabulary(config_name, conf_folders(overrides, conf))

    def default(key: str, wrong: str) -> Any:
        rest = [o for o in overrides if o != wrong and not o.startswith("-")]
        for kept in (rest, []):
            try:
                return OmegaConf.select(_compose(kept, config_name, conf), key)
            except (HydraException, OmegaConfBaseException):
                continue
        return None

    return as_config_error(error, overrides, names, default=default)


def vocabulary(program: str, folders: Sequence[Path] = (CONF,)) -> Vocabulary:
    """Return the names that a program's command line may use."""
    return Vocabulary(program, SCHEMAS[program], folders)


def _compose(overrides: Sequence[str], config_name: str, conf: Path) -> DictConfig:
    with own_hydra(), initialize_config_dir(str(conf), job_name="rlhf", version_base="1.3"):
        return compose(config_name, overrides=list(overrides))


def conf_folders(overrides: Sequence[str], conf: Path = CONF) -> list[Path]:
    """Return the folders of configuration files: `conf`, and those of `hydra.searchpath=[...]`."""
    added = [o.partition("=")[2] for o in overrides if o.startswith("hydra.searchpath=")]
    paths = [p.strip(" '\"") for value in added for p in value.strip("[]").split(",")]
    return [conf, *(Path(p.removeprefix("file://")) for p in paths if p.startswith(("file:", "/")))]


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
