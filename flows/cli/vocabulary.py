"""Names that a command line may use (settings, option groups, experiments), and suggestions.

names = Vocabulary("rlhf", Rlhf, [CONF])
names.suggest("learning_rate", "1e-4")      # "train.lr=1e-4"
names.suggest("sft")                        # "+exp=sft_full or +exp=sft_qlora"
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

from flows.cli.peer_names import PEERS, translate
from tasks.core.terminal import command

CONF = Path(__file__).resolve().parents[2] / "conf"
"""Folder of the configuration files, beside the packages in a checkout and when installed."""
EXPERIMENTS = "exp"
"""Group of the experiments, chosen with `+exp=`; it has no default."""
_CALLED = ("experiment", "experiments", "recipe", "preset", "config", "config_file")
VALUE = "<value>"
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@cache  # a command line looks up hundreds of keys
def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of a section; of anything else, none."""
    return get_type_hints(kind) if is_dataclass(kind) else {}


@dataclass(frozen=True)
class Vocabulary:
    """Names of one program.

    Attributes:
        program: a name in `flows`, such as "rlhf" or "audit".
        root: dataclass of its settings.
        folders: folders of configuration files; the first one is the project's `conf`.
    """

    program: str
    root: type
    folders: Sequence[Path]

    @property
    def command(self) -> str:
        """Command that starts the program, as this process was started."""
        return command(self.program)

    def type_at(self, key: str) -> Any:
        """Return the type annotation of a dotted key; None for an unknown key."""
        kind: Any = self.root
        for name in key.split(".") if key else ():
            part, _, index = name.partition("[")
            kind = _hints(kind).get(part)
            if index and get_args(kind):
                kind = get_args(kind)[0]
        return kind

    def fields(self, section: str) -> list[str]:
        """Return the names in a section, in order; "" is the top level."""
        kind = self.type_at(section)
        return list(_hints(kind))

    def is_section(self, key: str) -> bool:
        """Return True if the key names a section."""
        return is_dataclass(self.type_at(key))

    def is_mapping(self, key: str) -> bool:
        """Return True if the key is a setting whose own keys are free, as `chain`."""
        return getattr(self.type_at(key), "__origin__", None) is dict

    def has(self, key: str) -> bool:
        """Return True for a setting, a section, and keys inside a setting that is a mapping."""
        parent = key
        while parent:
            kind = self.type_at(parent)
            if kind is not None:
                return parent == key or kind is Any or getattr(kind, "__origin__", None) is dict
            parent = parent.rpartition(".")[0]
        return False

    @cached_property
    def settings(self) -> list[str]:
        """Dotted keys of all settings, in order, without the sections themselves."""
        return list(self._below(""))

    def _below(self, section: str) -> Iterable[str]:
        for name in self.fields(section):
            key = f"{section}.{name}" if section else name
            if self.is_section(key):
                yield from self._below(key)
            else:
                yield key

    def kind(self, key: str) -> str:
        """Return a setting's type in words."""
        kind = self.type_at(key)
        options = [k for k in get_args(kind) if k is not type(None)]
        optional = type(None) in get_args(kind)
        plain = options[0] if optional and len(options) == 1 else kind
        if isinstance(plain, type) and issubclass(plain, Enum):
            words = "one of " + ", ".join(member.name for member in plain)
        elif is_dataclass(plain):
            words = f"a section: {', '.join(self.fields(key))}"
        elif getattr(plain, "__origin__", None) is list:
            words = "a list"
        elif getattr(plain, "__origin__", None) is dict:
            words = "a mapping"
        else:
            words = "any value" if plain is Any else _TYPES.get(plain, str(plain))
        return f"{words}, or null" if optional else words

    def words(self, key: str) -> list[str]:
        """Return the allowed words of a setting with an enumeration; else an empty list."""
        kind = self.type_at(key)
        options = [k for k in (kind, *get_args(kind)) if isinstance(k, type)]
        return [member.name for k in options if issubclass(k, Enum) for member in k]

    def near_word(self, key: str, word: str) -> str:
        """Return the value of `key` nearest to a mistyped one; an empty string for none."""
        return next(iter(nearest(word, self.words(key), n=1)), "")

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Options by group, of the groups that this program uses."""
        names = [*self.defaults, *([EXPERIMENTS] if self.program == "rlhf" else [])]
        groups = {
            name: sorted(
                {f.stem for folder in self.folders for f in (folder / name).glob("*.yaml")}
            )
            for name in names
        }
        if EXPERIMENTS in groups:
            named = {name for folder in self.folders for name in experiments(folder)}
            groups[EXPERIMENTS] = sorted(named)
        return groups

    @cached_property
    def defaults(self) -> dict[str, str]:
        """Default option of each group."""
        file = self.folders[0] / f"{self.program}.yaml"
        if not file.is_file():  # a command without Hydra
            return {}
        import yaml

        document = yaml.safe_load(file.read_text())
        entries = [entry for entry in document["defaults"] if isinstance(entry, dict)]
        return {k: v for entry in entries for k, v in entry.items() if "hydra/" not in k}

    def suggest(self, name: str, value: str = VALUE) -> str:
        """Return what to type instead of an unknown name; an empty string if nothing is similar."""
        bare = name.lstrip("-+~").replace("-", "_").replace("/", ".")
        parent, _, leaf = bare.rpartition(".")
        known = translate(self.program, bare, value) or translate(self.program, leaf, value)
        # The name is right and its form is not: `--lr 1e-4`, `data/path=x`.
        if self.has(bare) and not self.is_section(bare):
            return f"{bare}={value}"
        if known:
            return known
        if not parent and bare in self.groups:
            return self.choose(bare, value)
        if bare in _CALLED and value in self.groups.get(EXPERIMENTS, ()):
            return self.choose(EXPERIMENTS, value)
        step, _, rest = bare.partition(".")
        if rest and not self.has(step) and self.has(rest) and self.program == "rlhf":
            return f"steps.{step}.{rest}={value}"  # an override for one step of a chain
        return " or ".join(self._nearest(parent, leaf, value))

    def _nearest(self, parent: str, leaf: str, value: str) -> list[str]:
        """Return similar settings: of the same section, else of any section."""
        prefix = f"{parent}." if parent else ""
        beside = difflib.get_close_matches(leaf, self.fields(parent), n=2, cutoff=0.6)
        keys = [f"{prefix}{name}" for name in beside]
        keys = keys or [key for key in self.settings if key.rpartition(".")[2] == leaf][:3]
        if not keys and parent and not self.has(parent):  # a typo in the section
            keys = difflib.get_close_matches(f"{parent}.{leaf}", self.settings, n=1, cutoff=0.7)
        if not keys:
            leaves = {key.rpartition(".")[2]: key for key in reversed(self.settings)}
            near = difflib.get_close_matches(
                leaf, [*leaves, *PEERS.get(self.program, {})], n=1, cutoff=0.8
            )
            keys = [leaves.get(name, name) for name in near]
        return [self._typed(key, value) for key in keys]

    def _typed(self, key: str, value: str) -> str:
        if self.is_section(key) and value not in self.groups.get(key, ()):
            return f"{key}.<key>={value}"
        return translate(self.program, key, value) or f"{key}={value}"

    def choose(self, group: str, option: str) -> str:
        """Return the override that chooses an option, or the nearest ones to it."""
        options, sign = self.groups[group], "" if group in self.defaults else "+"
        near = [option] if option in options else nearest(option, options)
        return " or ".join(f"{sign}{group}={name}" for name in near)

    def option(self, word: str) -> str:
        """Return the override for a word that is an experiment's or an option's name."""
        for group in reversed(self.groups):
            if word in self.groups[group]:
                return self.choose(group, word)
        return ""


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
