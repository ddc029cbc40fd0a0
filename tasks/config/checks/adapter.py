"""Section `peft`: what an adapter can be asked for, and whether the model has what it names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.config.checks.finding import Finding
from tasks.config.checks.model import ALL_LINEAR, Known

_OF_ADAPTERS = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules",
)  # fmt: skip
"""Settings that mean something for an adapter alone, and are off by default."""


def adapter(peft: Mapping[str, Any], known: Known, *, weight_decay: float) -> list[Finding]:
    """Everything about the adapter that can be told before the model is loaded.

    Args:
        peft: the section.
        known: of the model.
        weight_decay: `train.weight_decay`.
    """
    if peft["kind"] == "none":
        return list(_without_adapter(peft))
    return [*_pissa(peft, weight_decay), *_patterns(peft, known), *_modules(peft, known)]


def new_tokens(tokens: Sequence[str], multiple: int) -> list[Finding]:
    """Tokens that are added to the base.

    Args:
        tokens: `model.new_tokens`.
        multiple: `model.vocab_multiple`.
    """
    key, found = "model.new_tokens", []
    if any(not token.strip() for token in tokens) or len(set(tokens)) < len(tokens):
        what = repr(list(tokens))
        found.append(Finding(key, what, "texts, each of them once", "model.new_tokens=['<tool>']"))
    if multiple < 1:
        key = "model.vocab_multiple"
        found.append(Finding(key, str(multiple), "at least 1", f"{key}=64"))
    return found


def _without_adapter(peft: Mapping[str, Any]) -> Iterator[Finding]:
    asked = [f"peft.{key}" for key in _OF_ADAPTERS if peft[key]]
    if peft["init"] != "default":
        asked.append("peft.init")
    for key in asked:
        yield Finding(key, "set with peft.kind=none", "an adapter has it", "peft=lora")


def _pissa(peft: Mapping[str, Any], weight_decay: float) -> Iterator[Finding]:
    if peft["pissa_niter"] is not None and peft["init"] != "pissa":
        found = f"{peft['pissa_niter']} with peft.init={peft['init']}"
        yield Finding("peft.pissa_niter", found, "only PiSSA has it", "peft.pissa_niter=null")
    if peft["init"] == "pissa" and weight_decay:
        # Decay would also shrink the half of the adapter that stands for the base's own part.
        allowed = "PiSSA's start is subtracted again within the adapter, so nothing may decay"
        found = f"{weight_decay:g} with peft.init=pissa"
        yield Finding("train.weight_decay", found, allowed, "train.weight_decay=0")


def _patterns(peft: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = peft[key] or {}
        if not isinstance(pattern, dict) or not all(
            isinstance(value, (int, float)) for value in pattern.values()
        ):
            example = "'peft.rank_pattern={q_proj: 16}'"
            yield Finding(f"peft.{key}", repr(pattern), "a number by module name", example)
            continue
        for name, value in pattern.items():
            if value <= 0:
                yield Finding(f"peft.{key}", f"{name}: {value:g}", "more than 0", f"{name}: 16")
            if known.modules and not _there(name, known.modules):
                yield _absent(f"peft.{key}", name, known.modules)


def _modules(peft: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    if not known.modules:
        return
    for name in peft["exclude_modules"] or ():
        if not _there(name, known.modules):
            yield _absent("peft.exclude_modules", name, known.modules)
    for name in peft["modules_to_save"] or ():
        if not _there(name, known.owners or known.modules):
            yield _absent("peft.modules_to_save", name, known.owners or known.modules)
    yield from _twice(peft)


def _twice(peft: Mapping[str, Any]) -> Iterator[Finding]:
    targets = peft["target_modules"]
    if targets == ALL_LINEAR or not isinstance(targets, (list, tuple)):
        return
    for name in sorted(set(targets) & set(peft["modules_to_save"] or ())):
        yield Finding(
            "peft.modules_to_save",
            f"{name} is among peft.target_modules too",
            "a module is trained whole or by an adapter",
            f"peft.target_modules=[{','.join(t for t in targets if t != name)}]",
        )


def _there(name: str, modules: Sequence[str]) -> bool:
    """As peft matches: by the end of the name, in whole dotted parts."""
    return any(one == name or one.endswith(f".{name}") for one in modules)


def _absent(key: str, name: str, modules: Sequence[str]) -> Finding:
    leaves = sorted({one.rpartition(".")[2] for one in modules})
    near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.5)
    allowed = f"the model has {', '.join(leaves)}"
    return Finding(key, f"no {name!r} here", allowed, f"{key}: {near[0] if near else '<module>'}")
