"""Recognise SOURCE: an adapter, a full model, shards of ours, or a DeepSpeed checkpoint.

checkpoint = recognise(Path("ckpt/checkpoint-500"))
checkpoint.kind      "adapter": what is planned for
checkpoint.line()    "ckpt/checkpoint-500: a PEFT adapter of rank 8 (adapter_model.safetensors)"

Several adapters are given with weights:

adapters=[DIR:0.7,DIR2:0.3]     W + 0.7 s1 B1 A1 + 0.3 s2 B2 A2, rounded once
adapters=[DIR,DIR2]             weights of 1: each as it was trained
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.audit import source as audit_source
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError, ConfigError, first_and_more
from tasks.core.files import meant
from tasks.core.terminal import typed
from tasks.delivery.examination import refused
from tasks.weights.heads import HEAD, detect, read_folder
from tasks.weights.lora import Adapter, read_adapter

Kind = Literal["adapter", "model", "shards", "deepspeed", "distributed"]
CONFIG, ADAPTER_CONFIG = audit_source.CONFIG, audit_source.ADAPTER_CONFIG
_PLANNED: Mapping[audit_source.Kind, Kind] = {
    audit_source.Kind.ADAPTER: "adapter",
    audit_source.Kind.MODEL: "model",
    audit_source.Kind.REWARD: "model",
    audit_source.Kind.VALUE: "model",
    audit_source.Kind.SHARDS: "shards",
    audit_source.Kind.DEEPSPEED: "deepspeed",
    audit_source.Kind.DISTRIBUTED: "distributed",
}
"""Kind of plan for each kind of checkpoint. The plan of a model deals with its head, too."""


@dataclass(frozen=True)
class Checkpoint:
    """A recognised SOURCE."""

    kind: Kind
    root: Path
    what: str  # description for a person, without the folder
    manifest: Mapping[str, Any] = field(default_factory=dict)  # our manifest; empty if it has none
    beside: tuple[str, ...] = ()  # other files in the folder, which are not used

    def line(self) -> str:
        """Return one line: the folder, its description, and the files that are not used."""
        rest = f"; left alone: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.root}: {self.what}{rest}"


def recognise(root: Path) -> Checkpoint:
    """Recognise a folder from its file names, its documents and the headers of its weights.

    Trainer leaves finished weights beside a folder of DeepSpeed states. Such a folder counts as the
    finished weights; name the folder of the states (`global_step...`) to deliver those.
    """
    try:
        recognised = audit_source.recognise(root)
    except ArtifactError as error:
        missing = not root.is_dir()
        message = f"source={root}: no such folder" if missing else error.message
        hint = typed("source", (missing and meant(root)) or "<folder>")
        raise ConfigError(message, hint=hint) from error
    kind = _PLANNED.get(recognised.kind)
    if kind is None:
        raise refused([audit(root)])
    return Checkpoint(kind, root, recognised.what, recognised.manifest, recognised.beside)


_WEIGHTED = re.compile(r"(?P<folder>.+):(?P<weight>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)")
HINT = "adapters=[<folder>:<weight>,<folder>:<weight>]"


@dataclass(frozen=True)
class Weighted:
    """An adapter and the factor on its update; 1 merges it as it was trained."""

    checkpoint: Checkpoint
    weight: float = 1.0


def read_sources(source: str | None, adapters: Sequence[str]) -> tuple[Checkpoint, list[Weighted]]:
    """Return SOURCE (the first of several adapters) and all adapters.

    `adapters` are texts "<folder>:<weight>" or "<folder>". Raises ConfigError if both settings or
    neither is set, or a folder is not an adapter.
    """
    if (source is None) == (not adapters):
        what = "source has to be given" if source is None else "source and adapters are both given"
        raise ConfigError(what, hint=f"source=<folder>, or {HINT}")
    if source is not None:
        checkpoint = recognise(Path(source).expanduser().absolute())
        return checkpoint, [Weighted(checkpoint)] if checkpoint.kind == "adapter" else []
    weighted = [_weighted(text) for text in adapters]
    findings = [
        f"{adapter.checkpoint.root}: {adapter.checkpoint.what}, not an adapter"
        for adapter in weighted
        if adapter.checkpoint.kind != "adapter"
    ]
    if findings:
        raise ConfigError(f"adapters: {first_and_more(findings)}", details=findings, hint=HINT)
    return weighted[0].checkpoint, weighted


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
    """Open several adapters, or one with a weight, as pairs (adapter, weight)."""
    opened: list[tuple[Adapter, float]] = []
    findings = []
    for index, item in enumerate(adapters):
        root = item.checkpoint.root
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
