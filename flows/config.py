"""From Hydra overrides to plain settings, the same under the command line and in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flows.config_errors import as_config_error, missing_value, refuse_unknown
from tasks.deliver.schema import Deliver
from tasks.schema import Rlhf
from tasks.schema.audit import Audit
from tasks.tracking import redact

CONF = Path(__file__).resolve().parents[1] / "conf"
"""Beside the packages, in a checkout and in an installation alike."""

SCHEMAS: dict[str, type] = {"rlhf": Rlhf, "deliver": Deliver, "audit": Audit}
"""By root file: what Hydra checks against."""

ConfigStore.instance().store(name="schema", node=Rlhf)
ConfigStore.instance().store(name="deliver_schema", node=Deliver)
ConfigStore.instance().store(name="audit_schema", node=Audit)


@dataclass(frozen=True)
class Composed:
    """A checked configuration.

    Attributes:
        settings: nested plain dictionaries; enumerations as their names.
        text: the same as YAML, without passwords.
        runs: absolute path of `paths.runs`.
        tracking_uri: MLflow's, the default filled in.
        tracking_root: folder for logged files; None when a server keeps them.
    """

    settings: dict[str, Any]
    text: str
    runs: Path
    tracking_uri: str
    tracking_root: Path | None

    @classmethod
    def of(cls, config: DictConfig) -> Composed:
        """Resolve what Hydra composed.

        Raises:
            ConfigError: a key was forced in with `+`, a mandatory value is missing, or an
                interpolation leads nowhere.
        """
        root = OmegaConf.get_type(config)
        refuse_unknown(config, root)
        try:
            settings = OmegaConf.to_container(
                config, resolve=True, throw_on_missing=True, enum_to_str=True
            )
        except MissingMandatoryValue as error:
            raise missing_value(error, root) from error
        except OmegaConfBaseException as error:
            raise as_config_error(error, (), [CONF], root) from error
        runs = Path(settings["paths"]["runs"]).expanduser().absolute()
        uri = settings["tracking"]["uri"]
        store = runs / "mlflow"
        return cls(
            settings=settings,
            text=OmegaConf.to_yaml(OmegaConf.create(_redacted(settings))),
            runs=runs,
            tracking_uri=uri or f"sqlite:///{store / 'mlflow.db'}",
            tracking_root=None if uri and not uri.startswith("sqlite:") else store / "artifacts",
        )


def compose_config(
    overrides: Sequence[str], *, config_name: str = "rlhf", conf: Path = CONF
) -> Composed:
    """Compose and check a configuration. Works within `hydra.main` and outside of it.

    Args:
        overrides: as on the command line, e.g. `["+exp=qlora", "train.lr=1e-4"]`.
        config_name: root file in `conf`, without its suffix.
        conf: folder of configuration files.

    Raises:
        ConfigError: an unknown key, a wrong type, a missing value.
        HydraException: an unknown group or option, an override that cannot be parsed.
    """
    with own_hydra(), initialize_config_dir(str(conf), job_name="rlhf", version_base="1.3"):
        try:
            config = compose(config_name, overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            folders, root = conf_folders(overrides, conf), SCHEMAS[config_name]
            raise as_config_error(error, overrides, folders, root) from error
    return Composed.of(config)


def conf_folders(overrides: Sequence[str], conf: Path = CONF) -> list[Path]:
    """Folders with configuration files: ours, and those that `hydra.searchpath=[...]` adds."""
    added = [o.partition("=")[2] for o in overrides if o.startswith("hydra.searchpath=")]
    paths = [p.strip(" '\"") for value in added for p in value.strip("[]").split(",")]
    return [conf, *(Path(p.removeprefix("file://")) for p in paths if p.startswith(("file:", "/")))]


@contextmanager
def own_hydra() -> Iterator[None]:
    """Hydra keeps its state in singletons; a composition within a job must leave them alone."""
    before = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        Singleton.set_state(before)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_redacted(part) for part in value]
    return redact(value) if isinstance(value, str) and "://" in value else value
