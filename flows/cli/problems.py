"""Mistakes of a configuration: where, what is allowed, what to type. All of them in one error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flows.cli.vocabulary import EXPERIMENTS, VALUE, Vocabulary, nearest
from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong and where, what is allowed, what to type.

    Attributes:
        word: the word of the command line that has it; empty if it is in a file.
    """

    message: str
    allowed: str = ""
    hint: str = ""
    word: str = ""

    def __str__(self) -> str:
        return f"{self.message}{f' -> {self.hint}' if self.hint else ''}"


class WrongValuesError(Exception):
    """Values that a section does not allow."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__(errors)
        self.errors = errors
        """As of pydantic's `ValidationError.errors`."""


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """Return one error for all problems; a single problem keeps its hint."""
    if len(problems) == 1:
        (problem,) = problems
        details = [problem.allowed] if problem.allowed else []
        return ConfigError(problem.message, details=details, hint=problem.hint)
    return ConfigError(f"{len(problems)} settings are wrong", details=[str(p) for p in problems])


def wrong_overrides(
    overrides: Sequence[str], names: Vocabulary, *, sweep: bool = False
) -> Iterator[Problem]:
    """Yield the overrides that Hydra cannot read, and those of unknown settings and options.

    Hydra stops at the first one, and suggests `+key=value` for a typo.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        try:
            override = parser.parse_override(text)
        except HydraException:
            allowed = (
                "a value with braces, brackets, quotes, colons or commas stands between quotes"
            )
            hint = names.suggest(key, value or VALUE) or f"{names.command} --help"
            if names.has(key):
                hint = f"\"{key}='{value}'\""
            yield Problem(f"{text}: cannot be read", allowed, hint, text)
            continue
        if override.is_hydra_override() or override.is_delete():
            continue
        if override.is_sweep_override() and not sweep:
            allowed = f"a list is {key}=[{value}], one text \"{key}='{value}'\""
            hint = f"{names.command} --multirun {text}"
            yield Problem(f"{text}: several values for one setting", allowed, hint, text)
        elif key in names.groups:
            yield from _wrong_option(text, key, value, names)
        elif not names.has(key):
            yield unknown_key(key, f"command line: {text}", names, value or VALUE, text)


def _wrong_option(text: str, group: str, value: str, names: Vocabulary) -> Iterator[Problem]:
    """Yield the mistake of an override that chooses an option of a group."""
    options, plain = names.groups[group], group in names.chosen
    unknown = [name for name in value.strip("[]").split(",") if name not in options]
    if unknown:
        what = "experiment" if group == EXPERIMENTS else f"option of {group}"
        listed = f"{names.command} --help lists the experiments"
        if group != EXPERIMENTS:
            listed = f"{group} is one of {', '.join(options)}"
        hint = names.choose(group, unknown[0]) or f"{'' if plain else '+'}{group}=<name>"
        yield Problem(f"{text}: there is no {what} {unknown[0]!r}", listed, hint, text)
    elif plain == text.startswith("+"):
        right = text.lstrip("+") if plain else f"+{text}"
        reason = "has a default, and is replaced" if plain else "has no default, and is added"
        yield Problem(f"{text}: the group {group} {reason}", "", right, text)


def unknown_key(
    key: str, place: str, names: Vocabulary, value: str = VALUE, word: str = ""
) -> Problem:
    """Return the problem of a key that the program does not have."""
    section = key.rpartition(".")[0]
    inside = f" {section}" if names.is_section(section) and section else ""
    hint = names.suggest(key, value) or f"{names.command} --help{inside}"
    return Problem(f"{key} is not a setting ({place})", "", hint, word)


def wrong_values(
    error: WrongValuesError, overrides: Sequence[str], names: Vocabulary
) -> list[Problem]:
    """Return a problem for each key with a value that pydantic refuses.

    Args:
        overrides: of the command line, to name the word; other values come from files.
    """
    problems: dict[str, Problem] = {}
    for each in error.errors:
        # A union's location goes on with the names of its types.
        path = [str(part) for part in each["loc"]]
        unknown = each["type"] == "unexpected_keyword_argument"
        while not unknown and path and not names.has(".".join(path)):
            path.pop()
        key = ".".join(path)
        words = [o for o in overrides if o.lstrip("+").startswith(f"{key}=")]
        place, word = (f"command line: {words[-1]}", words[-1]) if words else ("a file", "")
        if unknown:
            problems[key] = unknown_key(key, _file_with(path[-1], names) or place, names, word=word)
            continue
        default = names.default(key)
        near = "".join(nearest(str(each["input"]), names.words(key), n=1))
        place = place if words else _file_with(path[-1], names) or "composed configuration"
        hint = f"{key}={near or written(default)}" if near or default is not None else ""
        if names.is_section(key):
            hint = f"{key}.<key>=<value>"
        why = str(each["msg"]).replace("Input should", ", it should")
        message = f"{key}: {written(each['input'])!r} is not allowed"
        message += f" ({place})" if near or names.is_section(key) else f"{why} ({place})"
        problems[key] = Problem(message, f"{key} is {names.kind(key)}", hint, word)
    return list(problems.values())


def _file_with(leaf: str, names: Vocabulary) -> str:
    """Return place and line of a key in the user's own files of settings."""
    for file in (path for folder in names.folders[1:] for path in sorted(folder.rglob("*.yaml"))):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if re.match(rf"\s*{re.escape(leaf)}\s*:", line):
                return f"{file}:{number}"
    return ""


def missing_value(key: str, names: Vocabulary) -> ConfigError:
    """Return the error for a mandatory value that is missing."""
    what = {"source": "<folder of the checkpoint>", "out": "<a new folder>"}.get(key, VALUE)
    hint = f"{names.command} {key}={what}, beside what you typed"
    return ConfigError(f"{key} has to be set", hint=hint)


def written(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    return str(value) if value != "" else "''"
