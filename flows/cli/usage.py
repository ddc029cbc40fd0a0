"""Write the text of `--help`: what a program does, its experiments and options, every setting.

The help of a setting is the docstring below its field in the dataclasses of `tasks/config`, or the
comment behind it. Its value is that of the composed configuration, so `+exp=grpo --help` shows the
values of that experiment. The description of an experiment is the third line of its file.
"""

from __future__ import annotations

import ast
import inspect
import io
import shutil
import textwrap
import tokenize
from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType
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
    flags = ["", "Flags:", *(line for flag, text in FLAGS for line in _entry(flag, text))]
    return "\n".join(
        [
            _description(names.program),
            *_experiments(names),
            *(flags if names.defaults else ()),  # they are Hydra's
            *_groups(names),
            *settings,
        ]
    )


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


def experiment_line(file: Path) -> str:
    """Return the description of an experiment, its file's third line; empty for no comment."""
    with file.open(encoding="utf-8") as text:
        line = [next(text, "") for _ in range(3)][2]
    return line.lstrip("# ").strip() if line.startswith("#") else ""


def _groups(names: Vocabulary) -> list[str]:
    chosen = {k: v for k, v in names.groups.items() if k != EXPERIMENTS and len(v) > 1}
    if not chosen:
        return []
    entries = [
        _entry(f"{group}={names.defaults[group]}", f"one of {', '.join(options)}")
        for group, options in chosen.items()
    ]
    return ["", "Options (files of settings in conf/):", *(line for e in entries for line in e)]


def _settings(names: Vocabulary, config: DictConfig, topics: Sequence[str]) -> list[str]:
    lines: list[str] = []
    section = None
    for key in names.settings:
        parent = key.rpartition(".")[0]
        inside = [t for t in topics if key == t or key.startswith(f"{t}.")]
        if topics and not inside:
            continue
        if parent != section:
            section = parent
            lines += ["", _title(parent, names)]
        lines += _entry(f"{key}={setting_value(config, key)}", _about(key, names))
    return lines


def _title(section: str, names: Vocabulary) -> str:
    if not section:
        return "Settings (key=value):"
    return f"{section}: {section_help(names, section)}"


def section_help(names: Vocabulary, section: str) -> str:
    """Return the first paragraph of a section's docstring, in one line."""
    return " ".join((inspect.getdoc(names.type_at(section)) or "").split("\n\n")[0].split())


def setting_value(config: DictConfig, key: str) -> str:
    """Return the value of a setting as it is typed; `<required>` if it has none."""
    if OmegaConf.is_missing(config, key):
        return "<required>"
    value: Any = OmegaConf.select(config, key)
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, enum_to_str=True)
    return written(value) if not isinstance(value, dict) else str(value or "{}")


def _about(key: str, names: Vocabulary) -> str:
    return f"{setting_help(key, names)} ({names.kind(key)})".strip()


def setting_help(key: str, names: Vocabulary) -> str:
    """Return the help of a setting: the docstring below its field, or the comment behind it."""
    parent, _, name = key.rpartition(".")
    return _field_texts(names.type_at(parent)).get(name, "")


def _field_texts(schema: Any) -> dict[str, str]:
    """Return the text at each field of a section and its bases, by the field's name.

    Args:
        schema: dataclass that `hydra_schema` made from the section.
    """
    texts: dict[str, str] = {}
    for kind in schema.section.__mro__[:-1]:  # all but object
        module = inspect.getmodule(kind)
        assert module is not None
        texts |= _texts(module).get(kind.__name__, {})
    return texts


@cache
def _texts(module: ModuleType) -> dict[str, dict[str, str]]:
    """Return the texts at the fields of a module's classes: class -> field -> text."""
    source = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    texts: dict[str, dict[str, str]] = {}
    for kind in classes:
        fields = texts[kind.name] = {}
        for node, below in pairwise([*kind.body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                behind = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                words = [comments[number] for number in behind if number in comments]
                fields[node.target.id] = _docstring(below) or " ".join(words)
    return texts


def _docstring(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()) if is_text else ""  # type: ignore[attr-defined]


def _entry(left: str, right: str) -> list[str]:
    """Return the lines of two columns; a left text that is too long gets its own line."""
    width = max(_NARROW, min(_WIDE, shutil.get_terminal_size((_WIDE, 24)).columns))
    text = textwrap.wrap(right, width - _COLUMN - 2) or [""]
    blank = " " * (_COLUMN + 2)
    if len(left) > _COLUMN - 2:
        return [f"  {left}", *(blank + line for line in text)]
    return [f"  {left:<{_COLUMN}}{text[0]}", *(blank + line for line in text[1:])]
