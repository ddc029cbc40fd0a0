"""Recognise SOURCE: an adapter, a full model, shards of ours, a DeepSpeed checkpoint, or FSDP's.

source = recognise(Path("ckpt/checkpoint-500"))
source.kind      "adapter": what is planned for
source.line()    "ckpt/checkpoint-500: a PEFT adapter of rank 8 (adapter_model.safetensors)"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.audit import source as audit_source
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.files import meant
from tasks.core.terminal import typed
from tasks.delivery.examination import refused

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
class SourceFolder:
    """A recognised SOURCE."""

    kind: Kind
    root: Path
    what: str = ""  # description for a person, without the folder
    manifest: Mapping[str, Any] = field(default_factory=dict)  # our manifest; empty if it has none
    beside: tuple[str, ...] = ()  # other files in the folder, which are not used

    def line(self) -> str:
        """Return one line: the folder, its description, and the files that are not used."""
        rest = f"; left alone: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.root}: {self.what}{rest}"


def recognise(root: Path) -> SourceFolder:
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
        raise refused(audit(root))
    return SourceFolder(kind, root, recognised.what, recognised.manifest, recognised.beside)
