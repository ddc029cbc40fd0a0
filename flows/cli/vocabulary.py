"""Names that a command line may use (settings, option groups, experiments), and suggestions.

names = Vocabulary("rlhf", Rlhf, [CONF])
names.suggest("learning_rate", "1e-4")      # "train.lr=1e-4"
names.choose("exp", "sft")                  # "+exp=sft_full or +exp=sft_qlora"
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flows.cli.peer_names import translate
from tasks.core.terminal import command

CONF = Path(__file__).resolve().parents[2] / "conf"
"""Folder of the configuration files, beside the packages in a checkout and when installed."""
EXPERIMENTS = "exp"
"""Group of the experiments, chosen with `+exp=`; it has no default."""
VALUE = "<value>"
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@cache  # a command line looks up hundreds of keys
def _hints(section: Any) -> dict[str, Any]:
    """Return the annotations of a section; of anything else, none."""
    return get_type_hints(section) if is_dataclass(section) else {}


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

    def default(self, key: str) -> Any:
        """Return the default of a setting; None for an unknown one, or one that is computed."""
        value: Any = self.defaults
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return None if isinstance(value, str) and "${" in value else value

    def type_at(self, key: str) -> Any:
        """Return the type annotation of a dotted key; None for an unknown key."""
        kind: Any = self.root
        for name in key.split(".") if key else ():
            kind = _hints(kind).get(name)
        return kind

    def is_section(self, key: str) -> bool:
        """Return True if the key names a section."""
        return is_dataclass(self.type_at(key))

    def has(self, key: str) -> bool:
        """Return True for a setting, a section, and keys inside a setting that is a mapping."""
        inside = self._options(key.rpartition(".")[0])
        if any(get_origin(option) in (dict, Mapping) for option in inside):
            return True
        return bool(key) and self.type_at(key) is not None

    def _options(self, key: str) -> list[Any]:
        """Return the types that a setting may have."""
        kind = self.type_at(key)
        return [kind] if get_origin(kind) is Literal else [kind, *get_args(kind)]

    @cached_property
    def settings(self) -> list[str]:
        """Dotted keys of all settings, in order; those in sections come last."""
        return sorted(_below(self.root, ""), key=lambda key: "." in key)

    def kind(self, key: str) -> str:
        """Return a setting's type in words."""
        kind = self.type_at(key)
        options = [kind] if get_origin(kind) is Literal else get_args(kind) or [kind]
        options = [option for option in options if option is not NoneType]
        optional = ", or null" if NoneType in get_args(kind) else ""
        if words := self.words(key):
            return f"one of {', '.join(words)}{optional}"
        if get_origin(kind) in (list, tuple, dict) or len(options) > 1:
            return {list: "a list", tuple: "a list", dict: "a mapping"}.get(
                get_origin(kind), "any value"
            )
        if is_dataclass(kind):
            return f"a section: {', '.join(field.name for field in fields(kind))}"
        return f"{_TYPES.get(options[0], 'a mapping')}{optional}"

    def words(self, key: str) -> list[str]:
        """Return the allowed words of a setting that has such; else an empty list."""
        literal = next((o for o in self._options(key) if get_origin(o) is Literal), None)
        return list(map(str, get_args(literal)))

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
        """Return what to type instead of an unknown name; an empty string if nothing is similar."""
        bare = name.lstrip("-+~").replace("-", "_").replace("/", ".")
        parent, _, leaf = bare.rpartition(".")
        if self.has(bare) and not self.is_section(bare):  # `--lr 1e-4`, `data/path=x`, `--json`
            is_flag = value == VALUE and self.type_at(bare) is bool
            return f"{bare}={'true' if is_flag else value}"
        if known := translate(self.program, leaf, value):
            return known
        if bare in self.groups:
            return self.choose(bare, value)
        # A setting of the same section, else of any.
        beside = [key for key in self.settings if key.rpartition(".")[0] == parent]
        leaves = {key.rpartition(".")[2]: key for key in reversed(self.settings)}
        near = difflib.get_close_matches(bare, beside, n=2, cutoff=0.75)
        near = near or [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
        return " or ".join(f"{key}={value}" for key in near)

    def choose(self, group: str, option: str) -> str:
        """Return the override that chooses an option, or the nearest ones to it."""
        options, sign = self.groups[group], "" if group in self.chosen else "+"
        near = [option] if option in options else nearest(option, options)
        return " or ".join(f"{sign}{group}={name}" for name in near)

    def option(self, word: str) -> str:
        """Return the override for a word that is an experiment's or an option's name."""
        groups = (group for group in reversed(self.groups) if word in self.groups[group])
        return next((self.choose(group, word) for group in groups), "")


def _below(kind: Any, section: str) -> Iterator[str]:
    for name, inner in _hints(kind).items():
        if name in kind.__dataclass_fields__:
            key = f"{section}.{name}" if section else name
            yield from _below(inner, key) if is_dataclass(inner) else [key]


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
