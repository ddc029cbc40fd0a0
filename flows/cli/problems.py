"""Say what is wrong with a setting: the place, what is allowed, what to type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from flows.cli.vocabulary import VALUE, Vocabulary
from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong and where, what is allowed, what to type."""

    message: str
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message}{f' -> {self.hint}' if self.hint else ''}"


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """Return one error for all problems; a single problem keeps its hint."""
    if len(problems) == 1:
        (problem,) = problems
        details = [problem.allowed] if problem.allowed else []
        return ConfigError(problem.message, details=details, hint=problem.hint)
    return ConfigError(f"{len(problems)} settings are wrong", details=[str(p) for p in problems])


def unknown_key(key: str, place: str, names: Vocabulary, value: str = VALUE) -> Problem:
    """Return the problem of a key that the schema does not have."""
    section = key.rpartition(".")[0]
    inside = f" {section}" if section and names.is_section(section) else ""
    near = names.suggest(key, value)
    if section and names.is_mapping(section):
        return Problem(f"{key} is new ({place})", hint=f"'+{key}={value}'")
    return Problem(
        f"{key} is not a setting ({place})", hint=near or f"{names.command} --help{inside}"
    )


def wrong_value(key: str, cause: Exception, place: str, names: Vocabulary, default: Any) -> Problem:
    """Return the problem of a value that the schema does not allow; the hint has a valid one."""
    if key == "rl" and place.partition("rl=")[2] in names.groups.get("train", ()):
        name = place.partition("rl=")[2]
        allowed = "train=<algorithm> chooses its options of section rl too"
        return Problem(f"rl={name} is no choice ({place})", allowed, f"train={name}")
    if names.is_section(key):
        allowed = f"{key} is {names.kind(key)}"
        return Problem(f"{key} is a section, not a setting ({place})", allowed,
                       f"{key}.<key>=<value>")  # fmt: skip
    what = str(cause).splitlines()[0]
    value = re.search(r"[Vv]alue '([^']*)'", what)
    message = f"{key}: {value[1]!r} is not allowed" if value else f"{key}: {what}"
    text = written(default)
    near = names.near_word(key, value[1]) if value else ""
    allowed = f"{key} is {names.kind(key)}; its default is {text}"
    return Problem(f"{message} ({place})", allowed, f"{key}={near or text}")


def missing_value(error: OmegaConfBaseException, names: Vocabulary) -> ConfigError:
    """Return the error for a mandatory value that is missing."""
    key = str(error.full_key or error.key)
    what = {"source": "<folder of the checkpoint>", "out": "<a new folder>"}.get(key, VALUE)
    hint = f"{names.command} {key}={what}, beside what you typed"
    return ConfigError(f"{key} has to be given", hint=hint)


def written(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    return str(getattr(value, "name", value)) if value != "" else "''"
