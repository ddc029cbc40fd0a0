"""Explain errors of a configuration: the wrong override or file, the place, what to type.

Hydra and OmegaConf stop at the first mistake. `as_config_error` checks every override again, so
that one error names all mistakes. If no override is wrong, the mistake is in a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from flows.cli.problems import Problem, config_error, unknown_key, written, wrong_value
from flows.cli.vocabulary import EXPERIMENTS, VALUE, Vocabulary
from tasks.core.errors import ConfigError


def as_config_error(
    error: Exception,
    overrides: Sequence[str],
    names: Vocabulary,
    *,
    default: Callable[[str, str], Any] = lambda _, __: None,
) -> ConfigError:
    """Return an error with suggestions in place of Hydra's or OmegaConf's.

    Args:
        default: (key, wrong override) -> value of the key without that override.
    """
    sweep = "--multirun" in overrides or "-m" in overrides
    plain = [o for o in overrides if not o.startswith("-")]
    problems = [p for o in plain for p in _problems(o, names, default, sweep=sweep)]
    if problems:
        return config_error(problems)
    cause = schema_error(error)
    key = "" if cause is None else str(cause.full_key or cause.key or "")
    if cause is None or not key:
        lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
        hint = f"{names.command} --help"
        if "override 'rl'" in str(error):
            hint = "leave `override /rl` out: `override /train` chooses an algorithm's options too"
        return ConfigError(" ".join(lines[:2]) or type(error).__name__, hint=hint)
    place = _place(key, str(error), names.folders)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return config_error([unknown_key(key, place, names)])
    return config_error([wrong_value(key, cause, place, names, default(key, ""))])


def schema_error(error: BaseException) -> OmegaConfBaseException | None:
    """Return the OmegaConf error behind an error of Hydra; None if there is none.

    Both `__cause__` and `__context__` count, since Hydra raises some errors without `from`. The
    chain of causes may be a circle.
    """
    chain: list[BaseException] = [error]
    for each in chain:
        if isinstance(each, OmegaConfBaseException):
            return each
        causes = (each.__cause__, each.__context__)
        chain += [e for e in causes if e is not None and not any(e is seen for seen in chain)]
    return None


def _problems(
    text: str, names: Vocabulary, default: Callable[[str, str], Any], *, sweep: bool
) -> Iterator[Problem]:
    """Yield the mistakes of one override."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        yield unreadable(text, names)
        return
    key = override.key_or_group
    if override.is_hydra_override():
        return
    if override.is_sweep_override() and not sweep:
        start, _, values = text.partition("=")
        yield Problem(
            f"{text}: several values for one setting",
            f"a list is {start}=[{values}], one text {start}=\"'{values}'\"",
            f"{names.command} --multirun {text}",
        )
    elif key in names.groups:
        yield from _option_problems(text, override, names)
    elif not names.has(key):
        value = text.partition("=")[2] or VALUE
        yield unknown_key(key, f"command line: {text}", names, value=value)
    elif not override.is_delete() and not override.is_sweep_override():
        try:
            settings = OmegaConf.structured(names.root)
            OmegaConf.update(settings, key, override.value(), merge=True)
        except OmegaConfBaseException as error:
            place = f"command line: {text}"
            yield wrong_value(key, error, place, names, default(key, text))


def _option_problems(text: str, override: Override, names: Vocabulary) -> Iterator[Problem]:
    """Yield the mistakes of an override that chooses an option of a group."""
    group, value = override.key_or_group, override.value()
    plain = group in names.defaults
    wanted = value if isinstance(value, list) else [value]
    if override.is_sweep_override():
        wanted = list(override.sweep_string_iterator())
    unknown = [str(v) for v in wanted if str(v) not in names.groups[group]]
    if override.is_delete():
        return
    if unknown:
        listed = f"{group} is one of {', '.join(names.groups[group])}"
        what = "experiment" if group == EXPERIMENTS else f"option of {group}"
        yield Problem(
            f"{text}: there is no {what} {unknown[0]!r}",
            f"{names.command} --help lists the experiments" if group == EXPERIMENTS else listed,
            names.choose(group, unknown[0]) or f"{'' if plain else '+'}{group}=<name>",
        )
    elif override.is_add() == plain and not override.is_force_add():
        right = text.lstrip("+") if plain else f"+{text}"
        reason = "has a default, and is replaced" if plain else "has no default, and is added"
        yield Problem(f"{text}: the group {group} {reason}", hint=right)


_ELEMENT = re.compile(r"""[^\s,:\[\]{}"']+=[^,\[\]{}"']*""")
"""An override inside a list, as in `chain`: `train=sft`, without quotes."""


def unreadable(text: str, names: Vocabulary) -> Problem:
    """Return the problem of an override that Hydra cannot parse."""
    key, equals, value = text.partition("=")
    if value.startswith("="):
        return Problem(f"{text}: two equals signs", hint=f"{key}={value.lstrip('= ')}")
    pairs = {"[": "]", "{": "}", "(": ")"}
    opened = [left for left, right in pairs.items() if value.count(left) > value.count(right)]
    quotes = [quote for quote in "'\"" if value.count(quote) % 2]
    if opened or quotes:
        allowed = "the shell splits at blanks: put the whole value between quotes"
        closed = value + "".join(pairs[left] for left in reversed(opened))
        closed = closed.strip("".join(quotes)) if quotes else closed
        return Problem(f"{text}: {(opened or quotes)[0]!r} is not closed", allowed,
                       f"{key}='{closed}'")  # fmt: skip
    if equals and names.has(key.lstrip("+~")):
        quoted = _ELEMENT.sub(r'"\g<0>"', value)
        if value[:1] in ("[", "{") and quoted != value:
            allowed = "an element with an equals sign stands between quotes"
            plus = "+" if names.is_mapping(key.lstrip("+~")) else ""
            hint = f"'{plus}{key.lstrip('+')}={quoted}'"
            return Problem(f"{text}: the value cannot be read", allowed, hint)
        allowed = "a value with braces, brackets, colons or commas stands between quotes"
        return Problem(f"{text}: the value cannot be read", allowed, f"{key}=\"'{value}'\"")
    hint = names.suggest(key, value or VALUE) or f"{names.command} --help"
    return Problem(f"{text}: cannot be read; settings are written key=value", hint=hint)


def refuse_unknown(config: DictConfig, names: Vocabulary) -> None:
    """Refuse keys that `+key=value` has added and the schema does not have.

    Raises:
        ConfigError: there are such keys; the error names all of them.
    """
    problems = [
        unknown_key(key, f"command line: +{key}=...", names, value=written(value))
        for key, value in _keys(config, names)
        if not names.has(key)
    ]
    if problems:
        raise config_error(problems)


def _keys(config: DictConfig, names: Vocabulary, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name in config:
        key, node = f"{prefix}{name}", config._get_node(name)
        yield key, node._value() if node is not None and not isinstance(node, DictConfig) else VALUE
        if isinstance(node, DictConfig) and names.is_section(key):
            yield from _keys(node, names, f"{key}.")


def _place(key: str, message: str, folders: Sequence[Path]) -> str:
    """Return the file with the mistake: the one that Hydra names, else one that has the key."""
    named = re.search(r"In '([^']+)'", message)
    files = [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    if named:
        wanted = [f for f in files if f.with_suffix("").as_posix().endswith("/" + named[1])]
        if wanted:
            return _with_line(wanted[-1], key)
    leaf = key.rpartition(".")[2]
    with_key = [f for f in files if _line(f, leaf)]
    return _with_line(with_key[0], key) if with_key else "composed configuration"


def _line(path: Path, leaf: str) -> int | None:
    pattern = re.compile(rf"\s*{re.escape(leaf)}\s*:")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if pattern.match(line):
            return number
    return None


def _with_line(path: Path, key: str) -> str:
    line = _line(path, key.rpartition(".")[2])
    return f"{path}:{line}" if line else str(path)
