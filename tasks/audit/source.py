"""The opened source that every check reads.

source = open_source(Path("ckpt"), base=None)
source.kind is Kind.ADAPTER
source.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape
source.config("tokenizer_config.json").get("eos_token")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tasks.audit.folder import Folder
from tasks.audit.recognise import ADAPTER_CONFIG, Kind, Recognised, recognise
from tasks.audit.weights import StoredTensor, Weights
from tasks.core.errors import ArtifactError
from tasks.core.terminal import typed
from tasks.weights.files.source import Extent

READ_BYTES = 2 << 30
"""Most bytes of weights that are read unless `values` says otherwise."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Source:
    """A recognised folder, and the base to compare it with.

    Attributes:
        folder: files and JSON documents.
        recognised: kind and weights.
        base: the base model, opened in the same way; None if there is none.
        values: True to read tensor data, False for headers only; None reads up to `READ_BYTES`.
        adapter: folder of the adapter that was merged into the base; None if unknown.
        public_key: key that has to have signed the folder; None if no key was given.
        planned: True to plan the merge of an adapter, too, if nothing else is wrong with it.
        codes: worst severity of each code that was reported so far.
        explained: names of the tensors in these findings.
    """

    folder: Folder
    recognised: Recognised
    base: Source | None = None
    values: bool | None = None
    adapter: Path | None = None
    public_key: Path | None = None
    planned: bool = False
    codes: dict[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    explained: set[str] = field(init=False, default_factory=set, compare=False, repr=False)
    _made: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def once(self, make: Callable[[Source], _T]) -> _T:
        """Return `make(source)`, which is computed once and shared by the checks."""
        if make not in self._made:
            self._made[make] = make(self)
        result: _T = self._made[make]
        return result

    @property
    def kind(self) -> Kind:
        """Kind of the folder."""
        return self.recognised.kind

    @property
    def is_adapter(self) -> bool:
        """True if it is a PEFT adapter."""
        return self.kind is Kind.ADAPTER

    @property
    def is_model(self) -> bool:
        """True if it is a full model, with or without a reward or value head."""
        return self.kind in (Kind.MODEL, Kind.REWARD, Kind.VALUE)

    @property
    def is_read(self) -> bool:
        """True if the data of its tensors is read."""
        small = self.weights.nbytes <= READ_BYTES
        return bool(self.tensors) and (small if self.values is None else self.values)

    @property
    def has_base(self) -> bool:
        """True if there is a full model to compare it with."""
        return self.base is not None and self.base.is_model

    @property
    def weights(self) -> Weights:
        """Tensors of the source, from headers; empty for kinds that are not read by headers."""
        return self.recognised.weights

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of the source, by name."""
        return self.recognised.weights.tensors

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the file range of a tensor. Raises ArtifactError if it is not contiguous."""
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
    values: bool | None = None,
    adapter: Path | None = None,
    public_key: Path | None = None,
) -> Source:
    """Open a folder and its base: the one in `base`, else the one that an adapter names.

    Raises:
        ArtifactError: the folder or the base does not exist or cannot be listed.
    """
    folder = Folder(root.absolute())  # a child process in another folder reads it, too
    recognised = recognise(folder)
    base = base or (_named_base(folder) if recognised.kind is Kind.ADAPTER else None)
    opened = None
    if base is not None:
        base_folder = Folder(base.absolute())
        opened = Source(base_folder, recognise(base_folder), None, values)
    return Source(folder, recognised, opened, values, adapter, public_key)


def _named_base(folder: Folder) -> Path | None:
    """Return the local folder that an adapter names as its base, or its snapshot in the hub cache.

    A relative path is not followed: it depends on where training ran.
    """
    settings = folder.json(ADAPTER_CONFIG)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or "\0" in name:
        return None
    if name.startswith("/"):
        return Path(name) if Path(name).is_dir() else None
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(
            name, "config.json", revision=revision if isinstance(revision, str) else None
        )
    except (OSError, ValueError):  # no id of a model
        return None
    return Path(config).parent if isinstance(config, str) else None


def command(program: str, **settings: object) -> str:
    """Return a command line of Plumbline, quoted for the shell; a setting of None is left out."""
    words = [
        typed(key, str(value).lower() if isinstance(value, bool) else value)
        for key, value in settings.items()
        if value is not None
    ]
    return " ".join(["plumbline", program, *words])


def setting(file: str, **values: object) -> str:
    """Return an edit of a JSON file as text."""
    edits = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in values.items())
    return f"in {file}: {edits}"


def commands_of(source: Source) -> dict[str, str]:
    """Return the commands that a fix may name, with the folders of this audit."""
    base = source.base.folder.root if source.base is not None else None
    return commands(
        source.folder.root, base, source.adapter, needs_base=source.is_adapter or base is not None
    )


def commands(
    root: object, base: object = None, adapter: object = None, *, needs_base: bool = True
) -> dict[str, str]:
    """Return commands by the name that stands for them in the fix of a check."""
    known, adapter = base or "<base>", adapter or "<adapter>"
    merged = f"{root}-merged"
    return {
        "repair": command("audit", source=root, base=base, fix=True, out_dir=f"{root}-repaired"),
        "deliver": command(
            "deliver", source=root, base=known if needs_base else None, out=f"{root}-delivered"
        ),
        "merge": command("deliver", source=root, base=known, out=merged),
        "again": command("deliver", source=adapter, base=known, out=merged),
        "prove": command("audit", source=root, base=known, adapter=adapter, values=True),
        "with_base": command("audit", source=root, base=known),
        "values": command("audit", source=root, base=base, values=True),
        "serve": f"vllm serve {base or '<base>'} --enable-lora --lora-modules tuned={root}",
    }
