"""Names that a command line may use, and an error that has all of its mistakes.

names = Vocabulary("rlhf", Rlhf, [CONF])
names.suggest("train.lrr", "1e-4")          # "train.lr=1e-4"
names.choose("exp", "sft")                  # "+exp=sft_full or +exp=sft_qlora"
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tasks.core.errors import ConfigError
from tasks.core.terminal import command

CONF = Path(__file__).resolve().parents[2] / "conf"
"""Folder of the configuration files, beside the packages in a checkout and when installed."""
EXPERIMENTS = "exp"
"""Group of the experiments, chosen with `+exp=`; it has no default."""
VALUE = "<value>"
STEP = re.compile(r"steps\.(\w+)\.(.+)", re.DOTALL)
"""An override of a single step: the step's name, and the override."""
_TYPES: Mapping[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list",
    tuple: "a list",
}  # fmt: skip


@cache
def _types(root: Any) -> dict[str, Any]:
    """Return the annotations of a section, of its settings and of its sections, by dotted key."""
    types, hints = {"": root}, get_type_hints(root)
    for name in (field.name for field in fields(root)):
        below = _types(hints[name]) if is_dataclass(hints[name]) else {"": hints[name]}
        types |= {f"{name}.{key}".rstrip("."): kind for key, kind in below.items()}
    return types


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a setting may have."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


@dataclass(frozen=True)
class Vocabulary:
    """Names of a program in `flows`, such as "audit"; `root` is the dataclass of its settings.

    The first one of the folders of configuration files is the project's `conf`.
    """

    program: str
    root: type
    folders: Sequence[Path] = (CONF,)

    @property
    def command(self) -> str:
        """Command that starts the program, as this process was started."""
        return command(self.program)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Settings of the dataclass as nested values, in their order."""
        values: dict[str, Any] = asdict(self.root())
        return values

    def type_at(self, key: str) -> Any:
        """Return the type annotation of a dotted key; None for an unknown key."""
        return _types(self.root).get(key)

    def is_section(self, key: str) -> bool:
        """Return True if the key names a section."""
        return is_dataclass(self.type_at(key))

    def has(self, key: str) -> bool:
        """Return True for a setting, a section, and keys inside a setting that is a mapping."""
        inside = _options(self.type_at(key.rpartition(".")[0]))
        if any(get_origin(option) in (dict, Mapping) for option in inside):
            return True
        return bool(key) and self.type_at(key) is not None

    @cached_property
    def settings(self) -> list[str]:
        """Dotted keys of all settings, in order; those in sections come last."""
        keys = [key for key in _types(self.root) if not self.is_section(key)]
        return sorted(keys, key=lambda key: "." in key)

    def kind(self, key: str) -> str:
        """Return a setting's type in words."""
        options = [o for o in _options(self.type_at(key)) if o is not NoneType]
        optional = ", or null" if len(options) < len(_options(self.type_at(key))) else ""
        if words := self.words(key):
            return f"one of {', '.join(words)}{optional}"
        if len(options) > 1:
            return "any value"
        name = get_origin(options[0]) or options[0]
        return f"{_TYPES.get(name, 'a mapping')}{optional}"

    def words(self, key: str) -> list[str]:
        """Return the allowed words of a setting that has such; else an empty list."""
        options = _options(self.type_at(key))
        return [str(w) for o in options if get_origin(o) is Literal for w in get_args(o)]

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Options by group, of the groups that this program uses."""
        groups = {
            name: sorted({f.stem for root in self.folders for f in (root / name).glob("*.yaml")})
            for name in self.chosen
        }
        if self.program == "rlhf":
            groups[EXPERIMENTS] = sorted({n for root in self.folders for n in experiments(root)})
        return groups

    @cached_property
    def chosen(self) -> dict[str, str]:
        """Default option of each group."""
        file = self.folders[0] / f"{self.program}.yaml"
        if not file.is_file():  # a command without Hydra
            return {}
        import yaml

        document = yaml.safe_load(file.read_text())
        entries = [entry for entry in document["defaults"] if isinstance(entry, dict)]
        return {k: v for entry in entries for k, v in entry.items() if "hydra/" not in k}

    def suggest(self, name: str, value: str = VALUE) -> str:
        """Return what to type instead of an unknown name: the help if nothing is similar."""
        bare = name.lstrip("-+~").replace("-", "_").replace("/", ".")
        if step := STEP.fullmatch(bare):
            return in_step(step[1], self.suggest(step[2], value))
        parent, _, leaf = bare.rpartition(".")
        if self.has(bare) and not self.is_section(bare):  # `--lr 1e-4`, `data/path=x`, `--json`
            is_flag = value == VALUE and self.type_at(bare) is bool
            return f"{bare}={'true' if is_flag else value}"
        if bare in self.groups:
            return self.choose(bare, value)
        leaves = {key.rpartition(".")[2]: key for key in reversed(self.settings)}
        near = difflib.get_close_matches(bare, self.settings, n=2, cutoff=0.75)
        near = near or [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
        section = f" {parent}" if parent and self.is_section(parent) else ""
        return " or ".join(f"{key}={value}" for key in near) or f"{self.command} --help{section}"

    def choose(self, group: str, option: str) -> str:
        """Return the override that chooses an option, or the nearest ones to it."""
        options, sign = self.groups[group], "" if group in self.chosen else "+"
        near = [option] if option in options else nearest(option, options)
        return " or ".join(f"{sign}{group}={name}" for name in near or ["<name>"])


def experiments(conf: Path) -> list[str]:
    """Return the names of the experiments in a folder of configuration files."""
    root = conf / EXPERIMENTS
    names = [file.relative_to(root).with_suffix("").as_posix() for file in root.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def nearest(word: str, words: Sequence[str], n: int = 3) -> list[str]:
    """Return the words that are most similar to a mistyped or shortened one."""
    begun = [w for w in words if w.startswith(word)]
    close = difflib.get_close_matches(word, words, n=n, cutoff=0.5)
    inside = [w for w in words if word and word in w]
    return list(dict.fromkeys([*begun, *close, *inside]))[:n]


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong and where, what to type, and the word that has it, if any."""

    message: str
    hint: str = ""
    word: str = ""

    def __str__(self) -> str:
        return f"{self.message}{f' -> {self.hint}' if self.hint else ''}"


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """Return one error for all problems."""
    if len(problems) == 1:
        return ConfigError(problems[0].message, hint=problems[0].hint)
    return ConfigError(f"{len(problems)} settings are wrong", details=[str(p) for p in problems])


def in_step(step: str, hint: str) -> str:
    """Return a hint whose overrides reach a single step of a chain; "" is the whole run."""
    parts = hint.split(" or ")
    own = (f"steps.{step}.{part}" if re.match(r"[\w.]+=", part) else part for part in parts)
    return " or ".join(own) if step else hint


def no_setting(word: str, names: Vocabulary, value: str = "") -> Problem:
    """Return the problem of a word that is not written `key=value`; `value` is the word after."""
    key, _, own = (word if "=" in word else word.replace(":", "=", 1)).partition("=")
    options = [group for group in names.groups if word in names.groups[group]]
    hint = names.choose(options[-1], word) if options else names.suggest(key, own or value or VALUE)
    return Problem(f"{word}: settings are written key=value", hint, word)


def unknown_key(key: str, names: Vocabulary, word: str) -> Problem:
    """Return the problem of a key that the program does not have, in a word or in a file."""
    hint = names.suggest(key, word.partition("=")[2] or VALUE)
    return Problem(f"{key} is not a setting ({word or 'in a file'})", hint, word)


def wrong_values(errors: Sequence[Any], words: Sequence[str], names: Vocabulary) -> list[Problem]:
    """Return a problem for each key with a value that pydantic refuses (`ValidationError.errors`).

    A value that is not in the words of the command line comes from a file.
    """
    problems: dict[str, Problem] = {}
    for error in errors:
        # A union's location goes on with the names of its types.
        path = [str(part) for part in error["loc"]]
        unknown = error["type"] == "unexpected_keyword_argument"
        while not unknown and path and not names.has(".".join(path)):
            path.pop()
        key = ".".join(path)
        word = next((w for w in reversed(words) if w.lstrip("+").startswith(f"{key}=")), "")
        if unknown:
            problems[key] = unknown_key(key, names, word)
            continue
        if names.is_section(key):
            option = str(error["input"])
            group = next((g for g in names.groups if option in names.groups[g]), "")
            hint = names.choose(group, option) if group else f"{names.command} --help {key}"
            message = f"{key} is a section of settings ({word or 'in a file'})"
            problems[key] = Problem(message, hint, word)
            continue
        near = "".join(nearest(str(error["input"]), names.words(key), n=1))
        why = "" if near else f": {error['msg']}"
        message = f"{key}: {written(error['input'])!r} is not allowed ({word or 'in a file'}){why}"
        problems[key] = Problem(message, f"{key}={near or f'<{names.kind(key)}>'}", word)
    return list(problems.values())


def written(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    return str(value) or "''"
