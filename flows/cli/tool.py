"""Run a command that needs no Hydra: `key=value` words over the command's own dataclass.

    plumbline audit DIR base=DIR values=true

The dataclasses stand in `tasks/config/tools.py`. The module of the command, and what it imports,
is loaded after its words have been read, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flows.cli.composed import Composed, report, run_job
from flows.cli.problems import (
    Problem,
    WrongValuesError,
    config_error,
    missing_value,
    unknown_key,
    wrong_values,
)
from flows.cli.signals import exit_on_signals
from flows.cli.usage import brief, full
from flows.cli.vocabulary import VALUE, Vocabulary
from tasks.config import tools
from tasks.core.errors import ConfigError
from tasks.core.terminal import typed


@dataclass(frozen=True)
class Tool:
    """A command.

    Attributes:
        settings: its dataclass.
        folders: settings that words without `key=` stand for, in their order.
        bare: True if it runs without words; others print a short help then.
        passes_on: True if words from the first `-` on belong to the program that it starts.
    """

    settings: type
    folders: tuple[str, ...] = ()
    bare: bool = False
    passes_on: bool = False


TOOLS = {
    "audit": Tool(tools.Audit, ("source",)),
    "bisect": Tool(tools.Bisect, ("a", "b")),
    "compare": Tool(tools.Compare, ("a", "b")),
    "lineage": Tool(tools.Lineage, ("source",)),
    "open": Tool(tools.Open, bare=True),
    "promote": Tool(tools.Promote, ("source",)),
    "prune": Tool(tools.Prune),
    "serve": Tool(tools.Serve, ("source",), passes_on=True),
    "status": Tool(tools.Status, bare=True),
    "verify": Tool(tools.Verify, ("source",)),
}


UNREAD = 141
"""Exit status if the reader of the output has left, as of a shell's command after SIGPIPE."""


def main(name: str) -> int:
    """Run a command with the words of this process. Returns the exit status."""
    with exit_on_signals():
        try:
            status = run(name, sys.argv[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again
            return UNREAD
        return status


def run(name: str, words: Sequence[str]) -> int:
    """Run a command. Returns its exit status; 2 if a word is wrong."""
    tool, names = TOOLS[name], vocabulary(name)
    own, rest = _parted(words) if tool.passes_on else (words, words)
    if not own and not tool.bare:
        print(brief(names), file=sys.stderr)
        return 2
    if "--help" in own or "-h" in own:
        topics = [word for word in own if names.has(word)]
        print(full(names, OmegaConf.create(names.defaults), topics))
        return 0
    try:
        composed = read(name, own)
        job = import_module(f"flows.{name}").job
    except ConfigError as error:
        return report(error)
    return run_job(job, composed, list(rest))


def vocabulary(name: str) -> Vocabulary:
    """Return the names that a command's words may use."""
    return Vocabulary(name, TOOLS[name].settings)


def read(name: str, words: Sequence[str]) -> Composed:
    """Return the settings of a command from its words.

    A value is taken as it is, without YAML: a path may have any characters.

    Raises:
        ConfigError: words that are no settings, values of the wrong type, missing ones.
    """
    names = vocabulary(name)
    config = OmegaConf.create(names.defaults)
    words, problems = _settings(words, names)
    for word in words:
        key, _, value = word.partition("=")
        OmegaConf.update(config, key, None if value == "null" else value)
    try:
        composed = Composed.of(config, names.root)
    except WrongValuesError as error:
        problems += wrong_values(error, words, names)
    except MissingMandatoryValue as error:
        if not problems:
            raise missing_value(str(error.full_key), names) from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], hint=f"{names.command} --help") from error
    if problems:
        raise config_error(problems)
    return composed


def _settings(words: Sequence[str], names: Vocabulary) -> tuple[list[str], list[Problem]]:
    """Return the words as `key=value`, and the problems of those that are no settings."""
    pairs, folders, problems = dict[str, str](), list[str](), list[Problem]()
    for word in words:
        key, equals, value = word.partition("=")
        if equals and names.has(key) and not names.is_section(key):
            pairs[key] = value
        elif equals and not word.startswith("-") and not os.path.exists(word):
            problems.append(unknown_key(key, f"command line: {word}", names, value))
        elif word.startswith("-") or (names.has(word) and not os.path.exists(word)):
            hint = names.suggest(key, value or VALUE) or f"{names.command} --help"
            problems.append(Problem(f"{word}: settings are written key=value", hint=hint))
        else:
            folders.append(word)
    keys = TOOLS[names.program].folders
    free = [key for key in keys if key not in pairs]
    if len(folders) > len(free):
        hint = " ".join(typed(key, folder) for key, folder in zip(keys, folders, strict=False))
        message = f"{folders[-1]}: settings are written key=value"
        problems.append(Problem(message, hint=hint or f"{names.command} --help"))
    given = {**dict(zip(free, folders, strict=False)), **pairs}
    return [f"{key}={value}" for key, value in given.items()], problems


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words of the command, and those from the first `-` on; a first word is its own."""
    end = next((i for i, word in enumerate(words) if i and word.startswith("-")), len(words))
    return words[:end], words[end:]
