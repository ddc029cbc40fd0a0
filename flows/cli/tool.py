"""Run a command that needs no Hydra: `key=value` words over the command's own dataclass.

    plumbline audit DIR base=DIR values=true

The dataclasses stand in `tasks/config/tools.py`. The module of the command, and what it imports,
is loaded after its words have been read, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flows.cli.composed import Composed
from flows.cli.problems import Problem, config_error, missing_value, unknown_key, wrong_value
from flows.cli.signals import exit_on_signals
from flows.cli.usage import brief, full
from flows.cli.vocabulary import CONF, VALUE, Vocabulary
from tasks.config import tools
from tasks.config.section import hydra_schema
from tasks.core.disk import has_no_space, is_full, write_refused
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.redaction import with_passwords
from tasks.core.terminal import plain, to_stderr, typed


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
        except BrokenPipeError:
            if not _reader_has_left():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again
            return UNREAD
        return status


def _reader_has_left() -> bool:
    """Return True if nobody reads standard output any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def run(name: str, words: Sequence[str]) -> int:
    """Run a command. Returns its exit status; 2 if a word is wrong."""
    tool, names = TOOLS[name], vocabulary(name)
    own, rest = _parted(words) if tool.passes_on else (words, words)
    if not own and not tool.bare:
        print(brief(names), file=sys.stderr)
        return 2
    if "--help" in own or "-h" in own:
        topics = [word for word in own if names.has(word)]
        print(full(names, OmegaConf.structured(names.root), topics))
        return 0
    runs = Path()
    try:
        composed = read(name, own)
        runs = composed.runs
        status: int = import_module(f"flows.{name}").job(composed, list(rest))
        return status
    except PlumblineError as error:
        refused = error
    except Exception as error:
        # The databases of Prefect and MLflow hide a full disk behind errors of their own.
        if not (is_full(error) or has_no_space(runs)):
            raise
        refused = write_refused(runs, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    print(plain(refused.report()), file=sys.stderr)
    return refused.exit_code


def vocabulary(name: str) -> Vocabulary:
    """Return the names that a command's words may use."""
    return Vocabulary(name, hydra_schema(TOOLS[name].settings), (CONF,))


def read(name: str, words: Sequence[str]) -> Composed:
    """Return the settings of a command from its words.

    Raises:
        ConfigError: words that are no settings, values of the wrong type, missing ones.
    """
    names = vocabulary(name)
    config = OmegaConf.structured(names.root)
    pairs, problems = _pairs(with_passwords(words), names)
    for key, value in pairs:
        if (problem := _set(config, key, value, names)) is not None:
            problems.append(problem)
    if problems:
        raise config_error(problems)
    try:
        return Composed.of(config)
    except MissingMandatoryValue as error:
        raise missing_value(error, names) from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], hint=f"{names.command} --help") from error


def _pairs(words: Sequence[str], names: Vocabulary) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Return keys with their values, and the problems of words that are no settings."""
    pairs, folders, problems = list[tuple[str, str]](), list[str](), list[Problem]()
    for word in words:
        key, equals, value = word.partition("=")
        if equals and names.has(key):
            if any(key == other and value != another for other, another in pairs):
                to_stderr(f"warning: {key} is set twice; the last value is taken")
            pairs.append((key, value))
        elif word.startswith("-"):
            hint = names.suggest(key, value or VALUE) or f"{names.command} --help"
            problems.append(Problem(f"{word}: settings are written key=value", hint=hint))
        elif (equals or names.has(word)) and not os.path.exists(word):
            place = f"command line: {word}"
            hint = f"{key}={VALUE}"
            problems.append(
                unknown_key(key, place, names, value or VALUE)
                if equals
                else Problem(f"{word}: settings are written key=value", hint=hint)
            )
        else:
            folders.append(word)
    keys = TOOLS[names.program].folders
    free = [key for key in keys if key not in dict(pairs)]
    if len(folders) > len(free):
        hint = " ".join(typed(key, folder) for key, folder in zip(keys, folders, strict=False))
        rule = f"{folders[-1]}: settings are written key=value"
        problems.append(Problem(rule, hint=hint or f"{names.command} --help"))
    return [*zip(free, folders, strict=False), *pairs], problems


def _set(config: DictConfig, key: str, text: str, names: Vocabulary) -> Problem | None:
    """Set a value as it was typed; its field's type converts it. Returns what is wrong with it."""
    try:
        OmegaConf.update(config, key, None if text == "null" else text)
    except OmegaConfBaseException as error:
        default = OmegaConf.select(OmegaConf.structured(names.root), key)
        return wrong_value(key, error, f"command line: {key}={text}", names, default)
    return None


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words of the command, and those from the first `-` on; a first word is its own."""
    end = next((i for i, word in enumerate(words) if i and word.startswith("-")), len(words))
    return words[:end], words[end:]
