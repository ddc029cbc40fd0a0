"""A draft: the content of a repaired folder, before anything is written.

It becomes a `Source` with renamed tensors, edited JSON files and fewer files. The checks run on it
as on a folder, so a repair that would not help is found from headers and never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.audit.checks.files import intact_beside, other_set
from tasks.audit.folder import Folder, Listing
from tasks.audit.recognise import Kind, Recognised
from tasks.audit.source import Source
from tasks.audit.weights import Weights
from tasks.pipeline.artifact import SIGNATURE
from tasks.weights.files.index import index_of
from tasks.weights.files.reader import MANIFEST
from tasks.weights.files.source import Renamed
from tasks.weights.heads.folder import SIDE_FILES

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_NOT_COPIED = (*_PICKLES, ".safetensors", ".index.json")


@dataclass
class Draft:
    """The planned content of a repaired folder.

    Attributes:
        source: the folder as it is, with the set of weights to use.
        names: old key by new key.
        documents: JSON files to write, and templates as texts.
        done: descriptions of the changes, one line each.
        refused: reasons why something cannot be repaired, one line each.
        head: keys of a value head that is written to a separate folder.
    """

    source: Source
    names: dict[str, str]
    documents: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    head: tuple[str, ...] = ()

    @property
    def tensors(self) -> Renamed:
        """The tensors under their new names."""
        return Renamed(self.source, self.names)

    def edit(self, name: str, **changes: Any) -> None:
        """Change fields of a JSON file."""
        before = self.documents.get(name, dict(self.source.config(name)))
        self.documents[name] = {**before, **changes}

    def copied(self) -> list[str]:
        """Return the files to copy: all but the weights, and in subfolders all but pickles."""
        return [
            name for name in self.source.folder.files
            if not name.endswith(_PICKLES if "/" in name else _NOT_COPIED)
            and name not in (MANIFEST, SIGNATURE, *self.documents)
            and not any(part.startswith(".") for part in name.split("/"))
        ]  # fmt: skip

    def as_source(self) -> Source:
        """Return the draft as a source, for the checks."""
        before = self.source.recognised
        weights = _weights(before.weights, self.names)
        listing = _listing(self.source.folder, self.copied(), self.documents, weights)
        texts = {name: text for name, text in self.documents.items() if isinstance(text, str)}
        root, documents = self.source.folder.root, dict(self.documents)
        folder = Folder(root, _documents=documents, _texts=texts, _listing=listing)
        if weights.index is not None:
            total = {"metadata": {"total_size": weights.nbytes}, "weight_map": dict(weights.index)}
            folder._documents[index_of(weights.single)] = total
        kind = Kind.MODEL if self.head and before.kind is Kind.VALUE else before.kind
        return replace(
            self.source, folder=folder, values=False,
            recognised=Recognised(kind, before.what, before.dialect, weights),
        )  # fmt: skip


def begin(source: Source) -> Draft:
    """Start a draft from the folder, with the intact set of its weights."""
    beside, done = other_set(source), []
    if beside is not None and intact_beside(source):
        done = [f"weights of {beside.single}: those of {source.weights.single} are broken"]
        source = replace(source, recognised=replace(source.recognised, weights=beside))
    draft = Draft(source, {key: key for key in source.tensors}, done=done)
    if source.weights.is_pickled and source.tensors:
        draft.done.append(f"{source.weights.single} as safetensors")
    left = [
        name for name in source.folder.here()
        if name.endswith((".safetensors", ".bin"))
        and name not in (*source.weights.files, *SIDE_FILES, "training_args.bin")
    ]  # fmt: skip
    draft.done += [f"left out {name}" for name in left]
    if _index_is_wrong(source):
        draft.done.append(f"{index_of(source.weights.single)} rebuilt")
    return draft


def _index_is_wrong(source: Source) -> bool:
    weights = source.weights
    metadata = source.config(index_of(weights.single)).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and total != weights.nbytes:
        return True
    places = {key: tensor.file for key, tensor in weights.tensors.items()}
    alone = weights.index is None and len(weights.files) > 1
    return alone or (weights.index is not None and dict(weights.index) != places)


def _weights(before: Weights, names: Mapping[str, str]) -> Weights:
    """Return the weights with renamed tensors, and an index for them."""
    tensors = {new: before.tensors[old] for new, old in names.items()}
    single = before.single.rpartition(".")[0].replace("pytorch_model", "model") + ".safetensors"
    several = len(before.files) > 1
    return replace(
        before, single=single, tensors=tensors, others={},
        index={key: tensor.file for key, tensor in tensors.items()} if several else None,
        files=tuple(dict.fromkeys(tensor.file for tensor in tensors.values())),
    )  # fmt: skip


def _listing(
    folder: Folder, copied: list[str], documents: Mapping[str, object], weights: Weights
) -> Listing:
    files = {name: folder.files[name] for name in copied}
    files |= dict.fromkeys(documents, 1)
    files |= {name: folder.files[name] for name in weights.files}
    if weights.index is not None:
        files[index_of(weights.single)] = 1
    original = folder.listing
    return Listing(files, original.folders, {}, original.outside, original.special, "")
