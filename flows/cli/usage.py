"""Write the text of `--help`: what a program does, its experiments and options, every setting.

The help of a setting is the comment behind its field in the dataclasses of `tasks/config`. Its
value is that of the composed configuration, so `+exp=grpo --help` shows the values of that
experiment. The description of an experiment is the third line of its file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flows.cli.vocabulary import CONF, EXPERIMENTS, Vocabulary, experiments, written
from tasks.core.terminal import plain

FLAGS = (
    ("--help [section ...]", "this text, or the settings of these sections alone"),
    ("--cfg job", "print the composed configuration and exit"),
    ("--multirun key=a,b", "one run after the other for every value"),
    ("--info defaults", "how the configuration is put together"),
    ("--config-dir DIR", "a folder with your configuration files, e.g. DIR/exp/mine.yaml"),
)
_WIDTH = 110
_COLUMN = 32


def brief(names: Vocabulary) -> str:
    """Return the short help, which is printed for a command line without arguments."""
    more = f"every option and setting: {names.command} --help"
    return "\n".join([*_head(names), "", more])


def full(names: Vocabulary, config: DictConfig, topics: Sequence[str] = ()) -> str:
    """Return the whole help; with `topics` that of the settings of these sections or keys."""
    settings = list(_settings(names, config, topics))
    if topics:
        return "\n".join(settings).strip("\n")
    lines = [*_head(names)]
    if names.chosen:  # a command line of Hydra
        lines += ["", "Flags:", *(line for flag in FLAGS for line in _entry(*flag))]
        lines += ["", "Options (files of settings in conf/):"]
        for group, default in names.chosen.items():
            lines += _entry(f"{group}={default}", f"one of {', '.join(names.groups[group])}")
    return "\n".join([*lines, *settings])


def _head(names: Vocabulary) -> list[str]:
    """Return the docstring of the program's file, which is not imported, and the experiments."""
    source = (CONF.parent / "flows" / f"{names.program}.py").read_text(encoding="utf-8")
    shown = ["", *experiment_lines(names.folders)] if EXPERIMENTS in names.groups else []
    text = ast.get_docstring(ast.parse(source)) or ""
    return [plain(text).replace(f"python flows/{names.program}.py", names.command), *shown]


def experiment_lines(folders: Sequence[Path] = (CONF,), words: Sequence[str] = ()) -> list[str]:
    """Return a line for each experiment whose name has all of these words."""
    files = {
        f"+exp={name}": folder / EXPERIMENTS / f"{name}.yaml"
        for folder in folders
        for name in experiments(folder)
        if all(word in name for word in words)
    }
    if not files:
        return [f"no experiment has {' and '.join(words)} in its name: plumbline list"]
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {experiment_line(file)}" for name, file in files.items()]
    return ["Experiments:", *lines, "", "What one would do: plumbline plan +exp=NAME"]


def listed_experiments(words: Sequence[str]) -> list[str]:
    """Return the lines of `plumbline list [--config-dir DIR] [WORD ...]`."""
    parser = argparse.ArgumentParser("plumbline list", allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", type=Path, default=[CONF])
    parser.add_argument("words", nargs="*", metavar="WORD")
    typed = parser.parse_intermixed_args(words)
    return experiment_lines(typed.config_dir, typed.words)


def experiment_line(file: Path) -> str:
    """Return the description of an experiment, its file's third line; empty for no comment."""
    line = [*file.read_text(encoding="utf-8").splitlines(), "", "", ""][2]
    return line.lstrip("# ").strip() if line.startswith("#") else ""


def _settings(names: Vocabulary, config: DictConfig, topics: Sequence[str]) -> Iterator[str]:
    section = None
    for key in names.settings:
        parent, _, name = key.rpartition(".")
        if topics and not any(key == t or key.startswith(f"{t}.") for t in topics):
            continue
        kind = names.type_at(parent)
        if parent != section:
            section = parent
            about = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
            yield from ("", f"{parent}: {about}" if parent else "Settings (key=value):")
        comments = [_comments(base)[name] for base in kind.__mro__ if name in _comments(base)]
        about = f"{''.join(comments[:1])} ({names.kind(key)})".strip()
        yield from _entry(f"{key}={_setting_value(config, key)}", about)


def _setting_value(config: DictConfig, key: str) -> str:
    """Return the value of a setting as it is typed; `<required>` if it has none."""
    if OmegaConf.is_missing(config, key):
        return "<required>"
    value: Any = OmegaConf.select(config, key)
    return written(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


@cache
def _comments(section: type) -> dict[str, str]:
    """Return the comments behind the fields of a class itself, by field."""
    if section.__module__ == "builtins":
        return {}
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(section), re.M))


def _entry(left: str, right: str) -> list[str]:
    """Return the lines of two columns; a left text that is too long gets its own line."""
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    text = textwrap.wrap(right, max(40, width - _COLUMN - 2)) or [""]
    blank = " " * (_COLUMN + 2)
    if len(left) > _COLUMN - 2:
        return [f"  {left}", *(blank + line for line in text)]
    return [f"  {left:<{_COLUMN}}{text[0]}", *(blank + line for line in text[1:])]
