"""Resolve a configuration: checked values, and what records may show of them; run a job with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flows.cli.vocabulary import VALUE, Problem, Vocabulary, config_error, wrong_values
from tasks.core.errors import Finding, PlumblineError
from tasks.core.files import full_disk
from tasks.core.redaction import INTERPOLATION, hide_in_url, hide_interpolated, redacted
from tasks.core.terminal import plain

_OUR_VARIABLES = ("${oc.env:PLUMBLINE_RUNS,runs}", "${oc.env:MLFLOW_TRACKING_URI,null}")
"""Defaults of `paths.runs` and `tracking.uri`; what they stand for is recorded."""
_EXAMPLES = {"source": "<folder of the checkpoint>", "out": "<a new folder>"}


@dataclass(frozen=True)
class Composed:
    """A checked configuration as nested plain dictionaries.

    `recorded` are the settings without secrets, and with `${oc.env:NAME}` in place of what it
    stands for; `runs` is absolute; `tracking_root` is None if a server stores logged files;
    `defaults` are lines about computed defaults: key, value and reason.
    """

    settings: dict[str, Any]
    recorded: dict[str, Any]
    runs: Path
    tracking_uri: str
    tracking_root: Path | None
    defaults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The recorded settings as YAML."""
        return OmegaConf.to_yaml(OmegaConf.create(self.recorded))

    @classmethod
    def of(cls, config: DictConfig, section: type) -> Composed:
        """Resolve a configuration, and check it against its dataclass.

        Raises the errors of OmegaConf and pydantic.
        """
        typed = hide_variables_of(config)  # an error below may show a value
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        adapter = _adapter(section)
        settings: dict[str, Any] = adapter.dump_python(adapter.validate_python(values), mode="json")
        for text in _texts(settings):
            hide_in_url(text)
        runs = Path(settings["paths"]["runs"]).expanduser().absolute()
        uri, store = settings.get("tracking", {}).get("uri"), runs / "mlflow"
        return cls(
            settings=settings,
            recorded=_recorded(typed, settings),
            runs=runs,
            tracking_uri=uri or f"sqlite:///{store / 'mlflow.db'}",
            tracking_root=None if uri and not uri.startswith("sqlite:") else store / "artifacts",
        )


def resolve(
    config: DictConfig,
    names: Vocabulary,
    words: Sequence[str],
    problems: Sequence[Problem],
    checks: Callable[[dict[str, Any]], Iterator[Finding]] | None = None,
) -> Composed:
    """Check a configuration of the words that are right. Raises ConfigError with all problems.

    `problems` are mistakes in other words. If a word is wrong, the checks of the command run with
    the default in place of its value.
    """
    from pydantic import ValidationError

    problems, composed = list(problems), None
    try:
        composed = Composed.of(config, names.root)
    except ValidationError as error:
        wrong = wrong_values(error.errors(include_url=False), words, names)
        problems += wrong
        if checks is not None:
            defaults = OmegaConf.create(names.defaults)
            for problem in wrong:
                key = problem.message.partition(":")[0]
                OmegaConf.update(config, key, OmegaConf.select(defaults, key))
            composed = Composed.of(config, names.root)
    except MissingMandatoryValue as error:
        hint = f"{names.command} {error.full_key}={_EXAMPLES.get(str(error.full_key), VALUE)}"
        message = f"{error.full_key} has to be set"
        problems = problems or [Problem(message, f"{hint}, beside what you typed")]
    except OmegaConfBaseException as error:
        problems = problems or [Problem(str(error).splitlines()[0], f"{names.command} --help")]
    if problems or composed is None:
        if checks is not None and composed is not None:
            problems += [Problem(str(finding)) for finding in checks(composed.settings)]
        raise config_error(problems)
    return composed


def run_job(
    job: Callable[[Composed, list[str]], int], composed: Composed, words: Sequence[str]
) -> int:
    """Run a command, and print an error of ours. Returns the exit status."""
    try:
        return job(composed, list(words))
    except PlumblineError as error:
        return report(error)
    except Exception as error:
        if (refused := full_disk(error, composed.runs)) is None:
            raise
        return report(refused)


def report(error: PlumblineError) -> int:
    """Print an error. Returns its exit status."""
    print(plain(error.report()), file=sys.stderr)
    return error.exit_code


@cache
def _adapter(section: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(section)


def hide_variables_of(config: DictConfig) -> Any:
    """Hide what the variables in a configuration stand for. Returns its settings as typed."""
    typed = OmegaConf.to_container(config, resolve=False)
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
