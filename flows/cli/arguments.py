"""Sort the words of a command line before Hydra parses them: flags, overrides, folders, mistakes.

Hydra answers another tool's flag (`--learning_rate 1e-4`) with its usage, and a word without `=`
with a grammar error. This module reports all such mistakes together, with what to type instead. It
also separates the overrides of the run from those of single steps (`steps.ppo.train.lr=1e-5`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.cli.problems import Problem, config_error
from flows.cli.vocabulary import EXPERIMENTS, VALUE, Vocabulary
from tasks.core.terminal import quoted, typed

_FLAGS = {
    "--multirun": 0, "-m": 0, "--resolve": 0, "--version": 0, "--hydra-help": 0,
    "--cfg": 1, "-c": 1, "--info": 1, "-i": 1, "--package": 1, "-p": 1, "--shell-completion": 1,
    "-sc": 1,
}  # fmt: skip
"""Hydra's flags, and the number of their values."""
_SEARCHED = "hydra.searchpath"
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
    arguments, problems = Arguments(), list[Problem]()
    searched, plain, rest = list[str](), list[str](), list(words)
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
        elif flag in _FLAGS:
            optional = flag in ("--info", "-i") and "=" in "".join(rest[:1])
            count = 0 if joined or optional else _FLAGS[flag]
            arguments.flags += [word, *rest[:count]]
            rest = rest[count:]
        elif word.startswith("-"):
            if not joined and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
            hint = names.suggest(flag, value or VALUE) or f"{names.command} --help"
            problems.append(Problem(f"{word}: settings are written key=value", hint=hint))
        else:
            plain.append(word)
    for word in plain:
        if arguments.help and names.has(word):
            arguments.topics.append(word)
        elif _COLON.fullmatch(word) and not Path(word).exists():
            problems.append(_colon(word, names))
        elif names.program == "deliver" and _is_source(word, names, arguments.overrides):
            arguments.overrides.append(f"source={quoted(word)}")
        elif "=" in word or word.startswith("~"):
            (arguments.for_steps if _FOR_STEP.fullmatch(word) else arguments.overrides).append(word)
        else:
            message = f"{word}: settings are written key=value"
            problems.append(Problem(message, hint=_meant(word, names)))
    if problems:
        raise config_error(problems)
    # One override, so that a worker that gets the overrides finds all folders too.
    folders = [f"{_SEARCHED}=[{','.join(searched)}]"] if searched else []
    arguments.overrides = [*folders, *(_text(override, names) for override in arguments.overrides)]
    arguments.for_steps = [_text(override, names) for override in arguments.for_steps]
    return arguments


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides of the run, and those of single steps by the step's name."""
    by_step: dict[str, list[str]] = {}
    for match in filter(None, map(_FOR_STEP.fullmatch, overrides)):
        by_step.setdefault(match[1], []).append(match[2])
    return [o for o in overrides if not _FOR_STEP.fullmatch(o)], by_step


def _is_source(word: str, names: Vocabulary, overrides: Sequence[str]) -> bool:
    """Return True for the folder of `deliver DIR`, which may have an equals sign in its name."""
    named = any(o.startswith(("source=", "adapters=")) for o in overrides)
    key = word.partition("=")[0]
    known = names.has(key.lstrip("+~")) or key in names.groups
    return not (named or known) and ("=" not in word or Path(word).exists())


def _text(override: str, names: Vocabulary) -> str:
    """Quote the value of a text setting, such as a path, that Hydra cannot read as it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = override.partition("=")
    if not equals or names.kind(_FOR_STEP.sub(r"\2", key)) not in ("text", "text, or null"):
        return override
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return f"{key}={quoted(value)}"
    return override


def _colon(word: str, names: Vocabulary) -> Problem:
    name, _, override = word.partition(":")
    step = names.program == "rlhf" and not names.has(name)
    message = f"{word}: settings are written key=value, without a colon"
    return Problem(message, hint=f"{'steps.' if step else ''}{name}.{override}")


def _meant(word: str, names: Vocabulary) -> str:
    """Return suggestions for a word without `=`."""
    path = Path(word).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return f"--config-dir <folder above exp/> +{EXPERIMENTS}={path.stem}"
    if names.program == "rlhf" and path.exists():
        return typed("model.path" if path.is_dir() else "data.path", word)
    if names.has(word):
        return f"{word}={VALUE}"
    near = names.choose(EXPERIMENTS, word) if EXPERIMENTS in names.groups else ""
    return names.option(word) or names.suggest(word) or near or f"{names.command} --help"
