"""Read the adapters of a delivery: one, as SOURCE, or several with weights.

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
from tasks.weights.heads import HEAD, detect, read_folder
from tasks.weights.lora import Adapter, read_adapter

_WEIGHTED = re.compile(r"(?P<folder>.+):(?P<weight>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)")
HINT = "adapters=[<folder>:<weight>,<folder>:<weight>]"


@dataclass(frozen=True)
class Weighted:
    """An adapter and the factor on its update; 1 merges it as it was trained."""

    given: Given
    weight: float = 1.0


def given_adapters(source: str | None, adapters: Sequence[str]) -> tuple[Given, list[Weighted]]:
    """Return SOURCE (the first of several adapters) and all adapters.

    Args:
        source: setting `source`.
        adapters: setting `adapters`, each "<folder>:<weight>" or "<folder>".

    Raises:
        ConfigError: both settings or neither is set, a folder is not an adapter or is repeated, or
            a weight is 0.
    """
    if (source is None) == (not adapters):
        what = "source has to be given" if source is None else "source and adapters are both given"
        raise ConfigError(what, hint=f"source=<folder>, or {HINT}")
    if source is not None:
        given = recognise(Path(source).expanduser().absolute())
        return given, [Weighted(given)] if given.kind == "adapter" else []
    weighted = [_weighted(text) for text in adapters]
    findings = [
        f"{adapter.given.root}: {adapter.given.what}, not an adapter"
        for adapter in weighted
        if adapter.given.kind != "adapter"
    ]
    roots = [adapter.given.root.resolve() for adapter in weighted]
    findings += [f"{root}: given twice" for root in dict.fromkeys(roots) if roots.count(root) > 1]
    findings += [
        f"{adapter.given.root}: weight 0 leaves it out"
        for adapter in weighted
        if adapter.weight == 0
    ]
    if findings:
        raise ConfigError(f"adapters: {first_and_more(findings)}", details=findings, hint=HINT)
    return weighted[0].given, weighted


def _weighted(text: str) -> Weighted:
    match = _WEIGHTED.fullmatch(text)
    folder, weight = (match["folder"], float(match["weight"])) if match else (text, 1.0)
    return Weighted(recognise(Path(folder).expanduser().absolute()), weight)


def role(index: int, first: str = "adapter") -> str:
    """Return the name of the adapter at `index` in plans and among a stage's inputs."""
    return first if index == 0 else f"{first}_{index + 1}"


def weights_of(adapters: Sequence[Weighted]) -> dict[str, float]:
    """Return the weights by role; empty for one adapter with weight 1."""
    if len(adapters) == 1 and adapters[0].weight == 1:
        return {}
    return {role(index): adapter.weight for index, adapter in enumerate(adapters)}


def read_weighted(adapters: Sequence[Weighted]) -> list[tuple[Adapter, float]]:
    """Open several adapters, or one with a weight, as pairs (adapter, weight).

    Raises:
        ConfigError: an adapter has a head, and heads cannot be added up.
        ArtifactError: a file cannot be read.
    """
    opened: list[tuple[Adapter, float]] = []
    findings = []
    for index, item in enumerate(adapters):
        root = item.given.root
        folder = read_folder(root)
        if HEAD in folder.sources or detect(folder).is_of_reward:
            findings.append(f"{root}: has a head, and heads cannot be added up")
        opened.append((read_adapter(root, role(index), beside=folder.beside), item.weight))
    if findings:
        raise ConfigError(
            f"adapters: {first_and_more(findings)}",
            details=findings,
            hint="source=<that folder> alone",
        )
    return opened
