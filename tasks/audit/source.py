"""The opened source that every check reads.

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
from tasks.audit.weights import StoredTensor, Weights
from tasks.core.errors import ArtifactError
from tasks.weights.files.source import Extent

_SMALL = 2 << 30


@dataclass(frozen=True)
class Source:
    """A recognised folder, and the base to compare it with.

    Attributes:
        folder: files and JSON documents.
        recognised: kind and weights.
        base: the base model, opened in the same way; None if there is none.
        values: True if checks may read tensor data, not only headers.
        adapter: folder of the adapter that was merged into the base; None if unknown.
        public_key: key that has to have signed the folder; None if no key was given.
    """

    folder: Folder
    recognised: Recognised
    base: Source | None = None
    values: bool = False
    adapter: Path | None = None
    public_key: Path | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the folder."""
        return self.recognised.kind

    @property
    def is_adapter(self) -> bool:
        """True if it is a PEFT adapter."""
        return self.kind is Kind.ADAPTER

    @property
    def is_read(self) -> bool:
        """True if the data of its own tensors is read; that of adapters up to 2 GB always is."""
        return self.values or (self.is_adapter and self.weights.nbytes <= _SMALL)

    @property
    def is_model(self) -> bool:
        """True if it is a full model, with or without a reward or value head."""
        return self.kind in (Kind.MODEL, Kind.REWARD, Kind.VALUE)

    @property
    def weights(self) -> Weights:
        """Tensors of the source, from headers; empty for kinds that are not read by headers."""
        return self.recognised.weights

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of the source, by name."""
        return self.recognised.weights.tensors

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the file range of a tensor, for `tasks.weights.files.file_ranges.Reader`.

        Raises:
            ArtifactError: the tensor is not contiguous.
        """
        tensor = self.tensors[name]
        if tensor.start < 0:
            raise ArtifactError(f"{tensor.file}: {name}: the tensor is not contiguous")
        return (Extent(self.folder.root / tensor.file, tensor.start, tensor.nbytes),)

    def checksum(self, name: str) -> str | None:
        """Return None: hashes in the manifest of an audited folder are not trusted."""
        return None

    def config(self, name: str = "config.json") -> Mapping[str, Any]:
        """Return a JSON document of the folder; empty if there is no usable one."""
        return self.folder.json(name)


def open_source(
    root: Path,
    base: Path | None = None,
    *,
    values: bool = False,
    adapter: Path | None = None,
    public_key: Path | None = None,
) -> Source:
    """Open a folder and its base: the one in `base`, or the local folder that an adapter names.

    Args:
        root: the folder.
        base: folder of the model that it was trained on or made from.
        values: True if checks may read tensor data.
        adapter: folder of the adapter that was merged into the base.
        public_key: key that has to have signed the folder.

    Raises:
        ArtifactError: the folder or the base does not exist or cannot be listed.
    """
    folder = Folder(root.absolute())  # a child process in another folder reads it, too
    recognised = recognise(folder)
    base = base or (_named_base(folder) if recognised.kind is Kind.ADAPTER else None)
    if base is None:
        return Source(folder, recognised, None, values, adapter, public_key)
    base_folder = Folder(base.absolute())
    opened = Source(base_folder, recognise(base_folder), None, values)
    return Source(folder, recognised, opened, values, adapter, public_key)


def _named_base(folder: Folder) -> Path | None:
    """Return `base_model_name_or_path` if it is the absolute path of a local folder."""
    name = folder.json(ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name.startswith("/") or "\0" in name:
        return None
    return Path(name) if Path(name).is_dir() else None
