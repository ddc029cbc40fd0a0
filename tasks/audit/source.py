"""The opened source: what every family of findings is given.

source = open_source(Path("ckpt"), base=None)
source.kind is Kind.ADAPTER
source.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape
source.config("tokenizer_config.json").get("eos_token")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.audit.folder import Folder
from tasks.audit.recognise import ADAPTER_CONFIG, Kind, Recognised, recognise
from tasks.audit.weights import Held, Weights
from tasks.core.errors import ArtifactError
from tasks.weights.files.source import Extent


@dataclass(frozen=True)
class Source:
    """A recognised folder, and the base that it is held against.

    Attributes:
        folder: files and documents.
        recognised: what it is.
        base: the base model, opened likewise; None where none is known here.
        values: whether tensor data may be read, and not headers alone.
        adapter: folder of the adapter that was merged into the base to make it; None where none is
            given.
    """

    folder: Folder
    recognised: Recognised
    base: Source | None = None
    values: bool = False
    adapter: Path | None = None

    @property
    def kind(self) -> Kind:
        """What it is."""
        return self.recognised.kind

    @property
    def is_adapter(self) -> bool:
        """Whether it is a PEFT adapter."""
        return self.kind is Kind.ADAPTER

    @property
    def is_model(self) -> bool:
        """Whether it is a whole model, with or without a head for rewards or values."""
        return self.kind in (Kind.MODEL, Kind.REWARD, Kind.VALUE)

    @property
    def weights(self) -> Weights:
        """Its tensors, by headers; empty for what is not read by headers."""
        return self.recognised.weights

    @property
    def tensors(self) -> Mapping[str, Held]:
        """The same, by name."""
        return self.recognised.weights.tensors

    def extents(self, name: str) -> Sequence[Extent]:
        """Where a tensor's bytes lie, for `tasks.weights.files.file_ranges.Reader`.

        Raises:
            ArtifactError: its elements do not lie in order.
        """
        held = self.tensors[name]
        if held.start < 0:
            raise ArtifactError(f"{held.file}: {name}: its elements do not lie in order")
        return (Extent(self.folder.root / held.file, held.start, held.nbytes),)

    def sha256(self, name: str) -> str | None:
        """Unknown here: nobody vouches for a folder that is under examination."""
        return None

    def config(self, name: str = "config.json") -> Mapping[str, Any]:
        """A JSON document of the folder; empty where there is no usable one."""
        return self.folder.json(name)


def open_source(
    root: Path, base: Path | None = None, *, values: bool = False, adapter: Path | None = None
) -> Source:
    """Open a folder, and its base where one is given or the adapter names a folder that is there.

    Args:
        root: the folder.
        base: folder of the model that it was trained on, or made from.
        values: whether tensor data may be read.
        adapter: folder of the adapter that was merged to make it.

    Raises:
        ArtifactError: the folder, or the base, is not there or cannot be listed.
    """
    folder = Folder(root)
    recognised = recognise(folder)
    base = base or (_named_base(folder) if recognised.kind is Kind.ADAPTER else None)
    if base is None:
        return Source(folder, recognised, None, values, adapter)
    other = Folder(base)
    opened = Source(other, recognise(other), None, values)
    return Source(folder, recognised, opened, values, adapter)


def _named_base(folder: Folder) -> Path | None:
    """`base_model_name_or_path`, where that is an absolute path of a folder here."""
    said = folder.json(ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(said, str) or not said.startswith("/") or "\0" in said:
        return None
    return Path(said) if Path(said).is_dir() else None
