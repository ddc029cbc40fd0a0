"""Write the text of `--help`: what a program does, its experiments and options, every setting.

The help of a setting is the comment behind its field in the dataclasses of `tasks/config`. Its
value is that of the composed configuration, so `+exp=grpo --help` shows the values of that
experiment. The description of an experiment is the third line of its file.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flows.cli.problems import written
from flows.cli.vocabulary import CONF, EXPERIMENTS, Vocabulary, experiments
from tasks.core.terminal import plain

FLAGS = (
    ("--help [section ...]", "this text, or the settings of these sections alone"),
    ("--cfg job", "print the composed configuration and exit"),
    ("--multirun key=a,b", "one run after the other for every value"),
    ("--info defaults", "how the configuration is put together"),
    ("--config-dir DIR", "a folder with your configuration files, e.g. DIR/exp/mine.yaml"),
)
_NARROW, _WIDE = 80, 110
_COLUMN = 32


def brief(names: Vocabulary) -> str:
    """Return the short help, which is printed for a command line without arguments."""
    more = f"every option and setting: {names.command} --help"
    return "\n".join([_description(names.program), *_experiments(names), "", more])


def full(names: Vocabulary, config: DictConfig, topics: Sequence[str] = ()) -> str:
    """Return the whole help.

    Args:
        topics: sections or keys; only their settings are shown. Empty for all.
    """
    settings = _settings(names, config, topics)
    if topics:
        return "\n".join(settings).strip("\n")
    lines = [_description(names.program), *_experiments(names)]
    if names.chosen:  # a command line of Hydra
        lines += ["", "Flags:", *(line for flag, text in FLAGS for line in _entry(flag, text))]
        lines += ["", "Options (files of settings in conf/):"]
        for group, default in names.chosen.items():
            lines += _entry(f"{group}={default}", f"one of {', '.join(names.groups[group])}")
    return "\n".join([*lines, *settings])


def _description(program: str) -> str:
    """Return the docstring of the program's file without importing it, which would take seconds."""
    source = (CONF.parent / "flows" / f"{program}.py").read_text(encoding="utf-8")
    return plain(ast.get_docstring(ast.parse(source)) or "")


def _experiments(names: Vocabulary) -> list[str]:
    return ["", *experiment_lines((), names.folders)] if EXPERIMENTS in names.groups else []


def experiment_lines(words: Sequence[str] = (), folders: Sequence[Path] = (CONF,)) -> list[str]:
    """Return a line for each experiment below a heading for its folder, and what to type next.

    Args:
        words: only experiments whose names contain all of them.
    """
    entries = [
        (f"+exp={name}", folder / EXPERIMENTS / f"{name}.yaml")
        for folder in folders
        for name in experiments(folder)
        if all(word in name for word in words)
    ]
    if not entries:
        return [f"no experiment has {' and '.join(words)} in its name: plumbline list"]
    width = max(len(name) for name, _ in entries)
    lines = []
    for folder, group in groupby(entries, lambda entry: entry[1].parent):
        own = folder.is_relative_to(CONF / EXPERIMENTS)
        name = str(folder.relative_to(CONF / EXPERIMENTS) if own else folder)
        lines.append("Experiments:" if name == "." else f"Experiments in {name}:")
        lines += [f"  {typed:<{width}}  {experiment_line(file)}" for typed, file in group]
    return [*lines, "", "What one would do, and what it needs: plumbline plan +exp=NAME"]


def listed_experiments(words: Sequence[str]) -> list[str]:
    """Return the lines of `plumbline list [--config-dir DIR] [WORD ...]`."""
    folders, wanted, rest = [CONF], list[str](), list(words)
    while rest:
        flag, joined, value = rest.pop(0).partition("=")
        if flag in ("--config-dir", "-cd"):
            folders.append(Path(value if joined or not rest else rest.pop(0)))
        else:
            wanted.append(flag)
    return experiment_lines(wanted, folders)


def experiment_line(file: Path) -> str:
    """Return the description of an experiment, its file's third line; empty for no comment."""
    line = [*file.read_text(encoding="utf-8").splitlines(), "", "", ""][2]
    return line.lstrip("# ").strip() if line.startswith("#") else ""


def _settings(names: Vocabulary, config: DictConfig, topics: Sequence[str]) -> list[str]:
    lines: list[str] = []
    section = None
    for key in names.settings:
        parent = key.rpartition(".")[0]
        if topics and not any(key == t or key.startswith(f"{t}.") for t in topics):
            continue
        if parent != section:
            section = parent
            title = (
                f"{parent}: {section_help(names, parent)}" if parent else "Settings (key=value):"
            )
            lines += ["", title]
        about = f"{setting_help(key, names)} ({names.kind(key)})".strip()
        lines += _entry(f"{key}={setting_value(config, key)}", about)
    return lines


def section_help(names: Vocabulary, section: str) -> str:
    """Return the first paragraph of a section's docstring, in one line."""
    return " ".join((inspect.getdoc(names.type_at(section)) or "").split("\n\n")[0].split())


def setting_value(config: DictConfig, key: str) -> str:
    """Return the value of a setting as it is typed; `<required>` if it has none."""
    if OmegaConf.is_missing(config, key):
        return "<required>"
    value: Any = OmegaConf.select(config, key)
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    return written(value) if not isinstance(value, dict) else str(value or "{}")


def setting_help(key: str, names: Vocabulary) -> str:
    """Return the help of a setting: the comment behind its field."""
    parent, _, name = key.rpartition(".")
    return next((t[name] for t in map(_comments, names.type_at(parent).__mro__) if name in t), "")


@cache
def _comments(section: type) -> dict[str, str]:
    """Return the comments behind the fields of a class itself, by field."""
    if section.__module__ == "builtins":
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(section), re.M))


def _entry(left: str, right: str) -> list[str]:
    """Return the lines of two columns; a left text that is too long gets its own line."""
    width = max(_NARROW, min(_WIDE, shutil.get_terminal_size((_WIDE, 24)).columns))
    text = textwrap.wrap(right, width - _COLUMN - 2) or [""]
    blank = " " * (_COLUMN + 2)
    if len(left) > _COLUMN - 2:
        return [f"  {left}", *(blank + line for line in text)]
    return [f"  {left:<{_COLUMN}}{text[0]}", *(blank + line for line in text[1:])]
