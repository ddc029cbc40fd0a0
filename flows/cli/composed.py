"""Resolve a configuration: values without interpolations, and what records may show of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tasks.core.redaction import INTERPOLATION, hide_in_url, hide_interpolated, redacted

_OUR_VARIABLES = ("${oc.env:PLUMBLINE_RUNS,runs}", "${oc.env:MLFLOW_TRACKING_URI,null}")
"""Defaults of `paths.runs` and `tracking.uri`; what they stand for is recorded."""


@dataclass(frozen=True)
class Composed:
    """A checked configuration.

    Attributes:
        settings: nested plain dictionaries; enumerations as their names.
        recorded: the settings for records: without secrets, and with `${oc.env:NAME}` in place of
            what it stands for.
        runs: absolute path of `paths.runs`.
        tracking_uri: URI of MLflow, with the default filled in.
        tracking_root: folder for logged files; None if a server stores them.
        defaults: lines about computed defaults: key, value and reason.
    """

    settings: dict[str, Any]
    recorded: dict[str, Any]
    runs: Path
    tracking_uri: str
    tracking_root: Path | None
    defaults: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        """The recorded settings as YAML."""
        return OmegaConf.to_yaml(OmegaConf.create(self.recorded))

    @classmethod
    def of(cls, config: DictConfig) -> Composed:
        """Resolve a configuration.

        Raises:
            OmegaConfBaseException: a mandatory value is missing, or an interpolation names no
                setting.
        """
        typed = hide_variables_of(config)  # an error below may show a value
        settings: Any = OmegaConf.to_container(
            config, resolve=True, throw_on_missing=True, enum_to_str=True
        )
        for text in _texts(settings):
            hide_in_url(text)
        runs = Path(settings["paths"]["runs"]).expanduser().absolute()
        tracking = settings.get("tracking", {})  # a command without it records nothing
        if tracking and tracking["uri"] is None:
            tracking["uri"] = _own_server(runs)
        uri, store = tracking.get("uri"), runs / "mlflow"
        return cls(
            settings=settings,
            recorded=_recorded(typed, settings),
            runs=runs,
            tracking_uri=uri or f"sqlite:///{store / 'mlflow.db'}",
            tracking_root=None if uri and not uri.startswith("sqlite:") else store / "artifacts",
        )


def _own_server(runs: Path) -> str | None:
    """Return MLflow's URI if `make up` runs it with PostgreSQL: SQLite's rows would be missing."""
    if not runs.is_dir():
        return None
    from flows.servers.services import TRACKING, client_settings, services_of

    return client_settings(services_of(runs)).get(TRACKING)


def hide_variables_of(config: DictConfig) -> Any:
    """Hide what the variables in a configuration stand for. Returns its settings as typed."""
    typed = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    for text in _texts(typed):
        hide_interpolated(text)
    return typed


def _recorded(typed: Any, value: Any) -> Any:
    """Return a setting for records: as it was typed if it reads a variable, else redacted."""
    if isinstance(typed, dict) and isinstance(value, dict):
        return {key: _recorded(typed.get(key), part) for key, part in value.items()}
    if isinstance(typed, list) and isinstance(value, list):
        return [_recorded(*pair) for pair in zip(typed, value, strict=True)]
    reads = isinstance(typed, str) and INTERPOLATION in typed and typed not in _OUR_VARIABLES
    return redacted(typed if reads else value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value
