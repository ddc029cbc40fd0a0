"""Run a command that needs no Hydra: `key=value` words over the command's own dataclass.

    plumbline audit DIR base=DIR values=true

The dataclasses stand in `tasks/config/tools.py`. The module of the command, and what it imports,
is loaded after its words have been read, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.cli.composed import Composed, report, resolve, run_job
from flows.cli.usage import brief, full
from flows.cli.vocabulary import Problem, Vocabulary, no_setting, unknown_key
from tasks.config import tools
from tasks.core.errors import ConfigError, Finding


@dataclass(frozen=True)
class Tool:
    """A command and the dataclass of its settings."""

    settings: type
    folders: tuple[str, ...] = ()  # settings that words without `key=` stand for, in their order
    bare: bool = False  # runs without words; others print a short help then
    passes_on: bool = False  # words from the first `-` on belong to the program that it starts


TOOLS = {
    "audit": Tool(tools.Audit, ("source",)),
    "bisect": Tool(tools.Bisect, ("a", "b")),
    "compare": Tool(tools.Compare, ("a", "b")),
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
    try:
        status = run(name, sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again
        return UNREAD
    return status


def run(name: str, words: Sequence[str]) -> int:
    """Run a command. Returns its exit status; 2 if a word is wrong."""
    tool, names, passed_on = TOOLS[name], vocabulary(name), words
    if tool.passes_on:  # a first word is the command's own: `serve --help`
        end = next((i for i, w in enumerate(words) if i and w.startswith("-")), len(words))
        words, passed_on = words[:end], words[end:]
    if not words and not tool.bare:
        print(brief(names), file=sys.stderr)
        return 2
    if "--help" in words or "-h" in words:
        topics = [word for word in words if names.has(word)]
        print(full(names, OmegaConf.create(names.defaults), topics))
        return 0
    try:
        composed = read(name, words)
        job = import_module(f"flows.{name}").job
    except ConfigError as error:
        return report(error)
    return run_job(job, composed, passed_on)


def vocabulary(name: str) -> Vocabulary:
    """Return the names that a command's words may use."""
    return Vocabulary(name, TOOLS[name].settings)


def read(name: str, words: Sequence[str]) -> Composed:
    """Return the settings of a command from its words. Raises ConfigError with all mistakes.

    A value is taken as it is, without YAML: a path may have any characters.
    """
    names = vocabulary(name)
    pairs, folders, problems = dict[str, str](), list[str](), list[Problem]()
    for word in words:
        key, equals, value = word.partition("=")
        if equals and names.has(key) and not names.is_section(key):
            pairs[key] = value
        elif word.startswith("-") or (names.has(word) and not os.path.exists(word)):
            problems.append(no_setting(word, names))
        elif equals and not os.path.exists(word):
            problems.append(unknown_key(key, names, word))
        else:
            folders.append(word)
    free = [key for key in TOOLS[name].folders if key not in pairs]
    problems += [no_setting(folder, names) for folder in folders[len(free) :]]
    pairs |= zip(free, folders, strict=False)

    config = OmegaConf.create(names.defaults)
    for key, value in pairs.items():
        try:
            OmegaConf.update(config, key, None if value == "null" else value)
        except OmegaConfBaseException as error:  # half an interpolation
            problems.append(Problem(f"{key}: {str(error).splitlines()[0]}", f"{key}=<value>"))

    def checks(settings: dict[str, Any]) -> Iterator[Finding]:
        problems_of = getattr(import_module(f"flows.{name}"), "problems", None)
        return problems_of(settings) if problems_of else iter(())

    typed = [f"{key}={value}" for key, value in pairs.items()]
    return resolve(config, names, typed, problems, checks)
