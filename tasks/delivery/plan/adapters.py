"""The adapters of a delivery: one, as SOURCE, or several with weights.

adapters=[DIR:0.7,DIR2:0.3]     W + 0.7 s1 B1 A1 + 0.3 s2 B2 A2, rounded once
adapters=[DIR,DIR2]             weights of 1: each as it was trained
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ConfigError, first_and_more
from tasks.delivery.recognise import Given, recognise
from tasks.weights.adapters.read import Adapter, read_adapter
from tasks.weights.heads.folder import HEAD, read_folder
from tasks.weights.heads.merging import is_reward_adapter

_WEIGHTED = re.compile(r"(?P<folder>.+):(?P<weight>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)")
HINT = "adapters=[<folder>:<weight>,<folder>:<weight>]"


@dataclass(frozen=True)
class Weighted:
    """An adapter and the factor on what it adds: 1 merges it as it was trained."""

    given: Given
    weight: float = 1.0


def given_adapters(source: str | None, adapters: Sequence[str]) -> tuple[Given, list[Weighted]]:
    """SOURCE, or the first of several adapters, and the adapters there are.

    Args:
        source: the setting.
        adapters: the setting: "<folder>:<weight>" or "<folder>".

    Raises:
        ConfigError: both or neither are given; a folder that is no adapter, or is there twice.
    """
    if (source is None) == (not adapters):
        what = "source has to be given" if source is None else "source and adapters are both given"
        raise ConfigError(what, hint=f"source=<folder>, or {HINT}")
    if source is not None:
        given = recognise(Path(source).expanduser().absolute())
        return given, [Weighted(given)] if given.kind == "adapter" else []
    found = [_weighted(one) for one in adapters]
    findings = [
        f"{one.given.root}: {one.given.what}, no adapter"
        for one in found
        if one.given.kind != "adapter"
    ]
    roots = [one.given.root.resolve() for one in found]
    findings += [f"{root}: given twice" for root in dict.fromkeys(roots) if roots.count(root) > 1]
    findings += [f"{one.given.root}: weight 0 leaves it out" for one in found if one.weight == 0]
    if findings:
        raise ConfigError(f"adapters: {first_and_more(findings)}", details=findings, hint=HINT)
    return found[0].given, found


def _weighted(text: str) -> Weighted:
    match = _WEIGHTED.fullmatch(text)
    folder, weight = (match["folder"], float(match["weight"])) if match else (text, 1.0)
    return Weighted(recognise(Path(folder).expanduser().absolute()), weight)


def role(index: int, first: str = "adapter") -> str:
    """What the adapter of that place is called in plans, and among a stage's inputs."""
    return first if index == 0 else f"{first}_{index + 1}"


def weights_of(adapters: Sequence[Weighted]) -> dict[str, float]:
    """By role; empty where there is one adapter, merged as it was trained."""
    if len(adapters) == 1 and adapters[0].weight == 1:
        return {}
    return {role(index): one.weight for index, one in enumerate(adapters)}


def read_weighted(adapters: Sequence[Weighted]) -> list[tuple[Adapter, float]]:
    """Open several adapters, or one with a weight.

    Raises:
        ConfigError: one of them brings a head: heads cannot be added up.
        ArtifactError: unreadable files.
    """
    found: list[tuple[Adapter, float]] = []
    findings = []
    for index, one in enumerate(adapters):
        folder = read_folder(one.given.root)
        if HEAD in folder.sources or is_reward_adapter(folder):
            findings.append(f"{one.given.root}: brings a head, which has no weight")
        found.append((read_adapter(one.given.root, role(index), beside=folder.beside), one.weight))
    if findings:
        raise ConfigError(
            f"adapters: {first_and_more(findings)}",
            details=findings,
            hint="source=<that folder> alone",
        )
    return found
