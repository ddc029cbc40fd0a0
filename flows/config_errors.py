"""What a person reads when the schema refuses a configuration: key, place, what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from tasks.errors import ConfigError


def as_config_error(
    error: Exception, overrides: Sequence[str], folders: Sequence[Path], root: type
) -> Exception:
    """A schema error in our words; anything else (unknown option, bad grammar) as it is.

    Args:
        error: what composing raised.
        overrides: of the command line, to see whether the fault is there.
        folders: where configuration files are, to find the one with the fault.
        root: the schema.
    """
    cause = schema_error(error)
    if cause is None:
        return error
    key = str(cause.full_key or cause.key or "")
    place = _place(key, str(error), overrides, folders)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return unknown_key(key, place, root)
    what = str(cause).splitlines()[0]
    return ConfigError(
        f"{key}: {what} ({place})",
        details=[f"{key} is {_kind(key, root)}"],
        hint=f"{key}={_sample(key, root)}",
    )


def schema_error(error: BaseException) -> OmegaConfBaseException | None:
    """The schema's own complaint behind what Hydra raised, if there is one.

    Hydra raises some of its own without `from`, and one that goes through two of its jobs may be
    its own cause's cause.
    """
    known: list[BaseException] = [error]
    for one in known:
        if isinstance(one, OmegaConfBaseException):
            return one
        behind = (one.__cause__, one.__context__)
        known += [e for e in behind if e is not None and not any(e is other for other in known)]
    return None


def unknown_key(key: str, place: str, root: type) -> ConfigError:
    """An error for a key that the schema does not have."""
    parent, _, name = key.rpartition(".")
    known = sorted(_fields(parent, root))
    allowed = f"{parent or 'the configuration'} knows: {', '.join(known) or 'nothing below it'}"
    near = _near(parent, name, root)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    return ConfigError(f"{key} is not a setting ({place})", details=[allowed], hint=hint)


def _near(parent: str, name: str, root: type) -> list[str]:
    """What may have been meant: a key beside it, else a key of that name in another section."""
    prefix = f"{parent}." if parent else ""
    beside = difflib.get_close_matches(name, sorted(_fields(parent, root)), n=3, cutoff=0.6)
    keys = [f"{prefix}{n}" for n in beside] or [
        f"{section}.{name}"
        for section in sorted(_fields("", root))
        if name in _fields(section, root)
    ]
    return [f"{k}.<key>=..." if is_dataclass(_type_at(k, root)) else f"{k}=..." for k in keys]


def missing_value(error: OmegaConfBaseException, root: type) -> ConfigError:
    """An error for a value that has to be given."""
    key = str(error.full_key or error.key)
    return ConfigError(f"{key} has to be given", hint=f"{key}={_sample(key, root)}")


def refuse_unknown(config: DictConfig, root: type) -> None:
    """Refuse keys that a `+key=value` has forced past the schema.

    Raises:
        ConfigError: naming the first of them.
    """
    for key in _keys(config, root):
        parent, _, name = key.rpartition(".")
        if name not in _fields(parent, root):
            raise unknown_key(key, f"command line: +{key}=...", root)


def _keys(config: DictConfig, root: type, prefix: str = "") -> Iterable[str]:
    for name in config:
        key = f"{prefix}{name}"
        yield key
        node = config._get_node(name)
        if isinstance(node, DictConfig) and is_dataclass(_type_at(key, root)):
            yield from _keys(node, root, f"{key}.")


def _type_at(key: str, root: type) -> Any:
    """The annotation of a dotted key; None where the schema has no such key."""
    kind: Any = root
    for name in key.split(".") if key else ():
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    return kind


def _fields(parent: str, root: type) -> set[str]:
    kind = _type_at(parent, root)
    return set(get_type_hints(kind)) if is_dataclass(kind) else set()


def _plain(key: str, root: type) -> tuple[Any, bool]:
    """A key's type without `| None`, and whether null is allowed."""
    kind = _type_at(key, root)
    options = [k for k in getattr(kind, "__args__", ()) if k is not type(None)]
    optional = len(options) == 1 and len(getattr(kind, "__args__", ())) == 2
    return (options[0], True) if optional else (kind, False)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _kind(key: str, root: type) -> str:
    kind, optional = _plain(key, root)
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = "one of " + ", ".join(member.name for member in kind)
    elif is_dataclass(kind):
        words = "a section with " + ", ".join(sorted(_fields(key, root)))
    else:
        words = _WORDS.get(kind, str(kind))
    return f"{words}, or null" if optional else words


def _sample(key: str, root: type) -> str:
    kind, _ = _plain(key, root)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(member.name for member in kind)
    return {int: "1", float: "0.1", bool: "true"}.get(kind, "...")


def _place(key: str, said: str, overrides: Sequence[str], folders: Sequence[Path]) -> str:
    """Where the fault is: the file that Hydra named, an override, or a file that has the key."""
    named = re.search(r"In '([^']+)'", said)
    files = [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    if named:
        wanted = [f for f in files if f.with_suffix("").as_posix().endswith("/" + named[1])]
        if wanted:
            return _with_line(wanted[-1], key)
    names = [(o, o.lstrip("+~").partition("=")[0]) for o in overrides]
    guilty = [
        o
        for o, name in names
        if name == key or key.startswith(name + ".") or name.startswith(key + ".")
    ]
    if guilty:
        return f"command line: {guilty[-1]}"
    leaf = key.rpartition(".")[2]
    holding = [f for f in files if _line(f, leaf)]
    return _with_line(holding[0], key) if holding else "composed configuration"


def _line(path: Path, leaf: str) -> int | None:
    pattern = re.compile(rf"\s*{re.escape(leaf)}\s*:")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if pattern.match(line):
            return number
    return None


def _with_line(path: Path, key: str) -> str:
    line = _line(path, key.rpartition(".")[2])
    return f"{path}:{line}" if line else str(path)
