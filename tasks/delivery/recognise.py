"""Recognise SOURCE: an adapter, a full model, shards of ours, or a DeepSpeed checkpoint.

given = recognise(Path("ckpt/checkpoint-500"))
given.kind        "adapter": what is planned for
given.line()      "ckpt/checkpoint-500: a PEFT adapter of rank 8 (adapter_model.safetensors)"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.audit import recognise as audit_recognise
from tasks.audit.folder import Folder
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError, ConfigError
from tasks.delivery.examination import refused

Kind = Literal["adapter", "model", "shards", "deepspeed"]
CONFIG, ADAPTER_CONFIG = audit_recognise.CONFIG, audit_recognise.ADAPTER_CONFIG
_PLANNED: Mapping[audit_recognise.Kind, Kind] = {
    audit_recognise.Kind.ADAPTER: "adapter",
    audit_recognise.Kind.MODEL: "model",
    audit_recognise.Kind.REWARD: "model",
    audit_recognise.Kind.VALUE: "model",
    audit_recognise.Kind.SHARDS: "shards",
    audit_recognise.Kind.DEEPSPEED: "deepspeed",
}
"""What is planned alike: heads are a matter of the plan for a model."""


@dataclass(frozen=True)
class Given:
    """A recognised SOURCE.

    Attributes:
        kind: what is planned for.
        root: its folder.
        what: what it is, for a person, without the folder.
        manifest: our manifest, where it has one; else empty.
        beside: what else lies in the folder and is left alone.
        dialect: who wrote it, where that can be told; else "".
    """

    kind: Kind
    root: Path
    what: str
    manifest: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    dialect: str = ""

    def line(self) -> str:
        """One line: folder, what it is, what is left alone."""
        rest = f"; left alone: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.root}: {self.what}{rest}"


def recognise(root: Path) -> Given:
    """Look at a folder: its file names, its documents, the headers of its weights.

    A folder that holds finished weights and a trainer's states (as Trainer leaves it) is the
    finished weights; the folder of the step itself names the states.

    Raises:
        ConfigError: nothing that can be delivered, with the findings that say so.
    """
    try:
        found = audit_recognise.recognise(Folder(root))
    except ArtifactError as error:
        missing = not root.is_dir()
        message = f"source={root}: no such folder" if missing else error.message
        raise ConfigError(message, hint="source=<folder>") from error
    kind = _PLANNED.get(found.kind)
    if kind is None:
        raise refused([audit(root)])
    return Given(kind, root, found.what, found.manifest, found.beside, found.dialect)
