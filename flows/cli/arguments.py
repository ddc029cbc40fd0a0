"""Sort the words of a command line before Hydra parses them: flags, overrides, folders, mistakes.

Hydra answers another tool's flag (`--learning_rate 1e-4`) with its usage, and a word without `=`
with a grammar error. This module reports all such mistakes together, with what to type instead. It
also separates the overrides of the run from those of single steps (`steps.ppo.train.lr=1e-5`).
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

from hydra._internal.utils import get_args_parser

from flows.cli.problems import Problem, config_error
from flows.cli.vocabulary import EXPERIMENTS, VALUE, Vocabulary
from tasks.core.errors import ConfigError
from tasks.core.terminal import quoted, typed

POSITIONAL: dict[str, tuple[str, ...]] = {"deliver": ("source",)}
"""Settings that folders set without `key=`, by program."""
_HYDRA_ONLY = ("--shell-completion", "-sc", "--hydra-help", "--version")
_SEARCHED = "hydra.searchpath"
_ASSIGN = ("=", ":", ":=")
_FOR_STEP = re.compile(r"steps\.(\w+)\.(.+)", re.DOTALL)
_COLON = re.compile(r"(\w+):(?!/)([\w./@]+=.*)", re.DOTALL)
"""The former way to write an override for a step."""


@dataclass
class Arguments:
    """Sorted words of a command line.

    Attributes:
        flags: Hydra's flags with their values.
        overrides: overrides of the run.
        for_steps: overrides of single steps of a chain, as typed.
        help: True for `--help`.
        topics: sections named with `--help`.
    """

    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    for_steps: list[str] = field(default_factory=list)
    help: bool = False
    topics: list[str] = field(default_factory=list)


def read(words: Sequence[str], names: Vocabulary) -> Arguments:
    """Sort a command line.

    Raises:
        ConfigError: a flag is unknown to Hydra, or a word is no override.
    """
    if any(word in _HYDRA_ONLY for word in words):
        return Arguments(flags=list(words))
    known = _Flags()
    problems: list[Problem] = []
    arguments, plain = Arguments(), []
    searched: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, joined, value = word.partition("=")
        if word in ("--help", "-h"):
            arguments.help = True
        elif flag in ("--config-dir", "-cd"):
            folder = Path(value if joined else rest.pop(0) if rest else ".").absolute()
            searched.append(f"file://{folder}")
        elif flag == _SEARCHED:
            searched += value.strip("[]").split(",")
        elif word.startswith("-"):
            taken = known.values(word, rest)
            if taken is None:
                problems.append(_unknown_flag(word, rest, names))
            else:
                arguments.flags += [word, *taken]
        else:
            plain.append(word)
    colons = [word for word in plain if _COLON.fullmatch(word) and not Path(word).exists()]
    problems += [_colon(word, names) for word in colons]
    overrides, arguments.for_steps = apart([word for word in plain if word not in colons])
    if arguments.help:
        arguments.topics = [word for word in overrides if names.has(word)]
        overrides = [word for word in overrides if word not in arguments.topics]
    overrides, wrong = _without_equals(overrides, names)
    if problems or wrong:
        raise config_error([*problems, *wrong])
    # One override, so that a worker that gets the overrides finds all folders too.
    arguments.overrides += [f"{_SEARCHED}=[{','.join(searched)}]"] if searched else []
    arguments.overrides += [_existing_path(override, names) for override in overrides]
    arguments.for_steps = [_existing_path(override, names) for override in arguments.for_steps]
    known.check(arguments.flags)
    return arguments


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides of the run, and those of single steps by the step's name."""
    plain, for_steps = apart(overrides)
    by_step: dict[str, list[str]] = {}
    for override in for_steps:
        _, name, own = override.split(".", 2)
        by_step.setdefault(name, []).append(own)
    return plain, by_step


def apart(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the run, and those of single steps as they were typed."""
    for_steps = [o for o in overrides if _FOR_STEP.fullmatch(o)]
    return [o for o in overrides if not _FOR_STEP.fullmatch(o)], for_steps


def repeated(overrides: Sequence[str]) -> list[str]:
    """Return the keys that are set twice to different values; Hydra takes the last one."""
    values: dict[str, set[str]] = {}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        values.setdefault(key, set()).add(value)
    return [key for key, several in values.items() if len(several) > 1]


class _Flags:
    """Flags of Hydra, read from its own parser."""

    def __init__(self) -> None:
        self.parser: ArgumentParser = get_args_parser()
        actions: list[Any] = self.parser._actions
        self.actions = {name: action for action in actions for name in action.option_strings}

    def values(self, word: str, rest: list[str]) -> list[str] | None:
        """Take the flag's values from `rest`; None for a flag that Hydra does not have."""
        name, joined, _ = word.partition("=")
        action = self.actions.get(name)
        if action is None:
            return None
        if joined or action.nargs == 0:
            return []
        optional = action.nargs == "?"
        if not rest or (optional and rest[0] not in (action.choices or ())):
            return []
        return [rest.pop(0)]

    def check(self, flags: Sequence[str]) -> None:
        """Raise ConfigError for a value that a flag does not take."""

        def refuse(message: str) -> NoReturn:
            raise ConfigError(message, hint="--cfg job, --info defaults, --multirun, --help")

        self.parser.error = refuse  # type: ignore[method-assign]
        self.parser.parse_args(flags)


def _unknown_flag(word: str, rest: list[str], names: Vocabulary) -> Problem:
    """Return the problem of another tool's flag; its value is taken from `rest`."""
    name, joined, value = word.partition("=")
    values = [value] if joined else []
    while not joined and rest and not rest[0].startswith("--") and "=" not in rest[0]:
        values.append(rest.pop(0))
    text = f"[{','.join(values)}]" if len(values) > 1 else "".join(values)
    hint = names.suggest(name, text or VALUE) or names.option(name.lstrip("-"))
    message = f"{word}: settings are written key=value, without dashes"
    return Problem(message, hint=hint or f"{names.command} --help")


def _without_equals(words: Sequence[str], names: Vocabulary) -> tuple[list[str], list[Problem]]:
    """Return the overrides, and the problems of words that are not overrides."""
    overrides: list[str] = []
    problems: list[Problem] = []
    folders: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        path = word.startswith(("~/", "./", "../", "/"))
        path = path or (not _is_named(word, names) and os.path.exists(word))
        if word.startswith("~") and not path:
            overrides.append(word)  # deletes a key
            continue
        key, equals, value = word.partition("=")
        if equals and _is_open(value) and rest and not _is_override(rest[0]):
            while rest and _is_open(value):
                value += f" {rest.pop(0)}"
            message = f"{key}: the shell splits a value at blanks; put it between quotes"
            problems.append(Problem(message, hint=f"{key}='{value}'"))
            continue
        bare = key.lstrip("+")
        if equals and not path and (value or not rest or _is_override(rest[0])):
            overrides.append(word)
        elif not (path and names.program in POSITIONAL) and (
            names.has(bare) or rest[:1] == ["="] or equals
        ):
            problems.append(_no_value(word, bare, rest, names))
        elif names.program in POSITIONAL:
            folders.append(word)
        else:
            problems.append(Problem(f"{word}: {_what(word)}", hint=_meant(word, names)))
    keys = POSITIONAL.get(names.program, ())
    free = [k for k in keys if not any(o.startswith((f"{k}=", "adapters=")) for o in overrides)]
    if len(folders) > len(free):
        rule = f"{folders[-1]}: one folder is taken, as {' and '.join(keys)}"
        hint = " ".join(typed(key, folder) for key, folder in zip(keys, folders, strict=False))
        problems.append(Problem(rule, hint=f"{hint} base=<folder>"))
    else:
        pairs = zip(free, folders, strict=False)
        overrides = [*(f"{key}={quoted(folder)}" for key, folder in pairs), *overrides]
    return overrides, problems


def _is_named(word: str, names: Vocabulary) -> bool:
    """Return True for `key=value` whose key the program has; a folder may be called `lr=1e-4`."""
    key, equals, _ = word.lstrip("+").partition("=")
    known = names.program not in POSITIONAL or names.has(key) or key in names.groups
    return bool(equals) and known


def _existing_path(override: str, names: Vocabulary) -> str:
    """Quote the value of a text setting if it exists as a path, or is a new entry of a folder."""
    key, _, value = override.partition("=")
    kind = names.type_at(_FOR_STEP.sub(r"\2", key).lstrip("+"))
    is_text = kind is str or str in get_args(kind)
    if not is_text or value in ("", "null", "-"):
        return override
    is_new = key == "out" and value[0] not in "'\"" and "${" not in value
    path = Path(value)
    try:
        if str(path).startswith("~"):
            path = path.absolute() if path.exists() else path.expanduser()
            value = str(path)
        is_path = path.exists() or (is_new and path.parent.is_dir())
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, nobody's home
        return override
    return f"{key}={quoted(value)}" if is_path else override


def _is_override(word: str) -> bool:
    return "=" in word[1:] or word.startswith(("~", "+", "-"))


def _is_open(value: str) -> bool:
    return any(value.count(a) > value.count(b) for a, b in ("[]", "{}", "()"))


def _no_value(word: str, key: str, rest: list[str], names: Vocabulary) -> Problem:
    """Return the problem of `train.lr 1e-4`, `train.lr = 1e-4`, `train.lr= 1e-4`, `train.lr`."""
    joined = word.endswith("=")
    if rest and rest[0] in _ASSIGN:
        joined = bool(rest.pop(0))
    value = "true" if names.kind(key) == "true or false" else VALUE
    if rest and (joined or not _is_override(rest[0])):
        value = rest.pop(0)
    blanks = "; no blanks around the equals sign" if joined else ""
    message = f"{word.rstrip('=')}: a setting is written key=value{blanks}"
    return Problem(message, hint=names.suggest(key, value) or f"{key}={value}")


def _colon(word: str, names: Vocabulary) -> Problem:
    name, _, override = word.partition(":")
    step = names.program == "rlhf" and not names.has(name)
    message = f"{word}: settings are written key=value, without a colon"
    return Problem(message, hint=f"{'steps.' if step else ''}{name}.{override}")


def _what(word: str) -> str:
    suffix = Path(word).suffix
    if suffix in (".yaml", ".yml"):
        return "a file of settings lies in a folder exp/ and is chosen by its name"
    return "settings are written key=value"


def _meant(word: str, names: Vocabulary) -> str:
    """Return suggestions for a word without `=`."""
    path = Path(word).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return f"--config-dir <folder above exp/> +{EXPERIMENTS}={path.stem}"
    if names.program == "rlhf" and path.is_dir():
        return typed("model.path", word)
    if names.program == "rlhf" and (
        path.is_file() or path.suffix in (".jsonl", ".csv", ".parquet")
    ):
        return typed("data.path", word)
    if names.option(word):
        return names.option(word)
    near = names.choose(EXPERIMENTS, word) if EXPERIMENTS in names.groups else ""
    return names.suggest(word) or near or f"{names.command} --help"
