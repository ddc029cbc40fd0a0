"""A draft: what the repaired folder will hold, before anything is written.

It is a `Source` in the making: tensors under other names, documents with other values, files left
out. The families judge it as they judge a folder, so that what cannot be repaired is told from
headers alone, and a repair that would not help is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.audit.checks.duplicate_formats import other_set, whole_beside
from tasks.audit.folder import Folder, Listing
from tasks.audit.recognise import Kind, Recognised
from tasks.audit.source import Source
from tasks.audit.weights import Weights
from tasks.weights.files.index import index_of
from tasks.weights.files.reader import MANIFEST
from tasks.weights.files.source import Renamed
from tasks.weights.heads.folder import SIDE_FILES

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".index.json")


@dataclass
class Draft:
    """What is going to be written.

    Attributes:
        source: the folder as it is, with the set of weights that is taken.
        names: old key by new key.
        documents: JSON files that are written anew.
        done: what was changed, one line each.
        refused: what could not be, one line each.
        head: keys of a value head that is kept apart.
    """

    source: Source
    names: dict[str, str]
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    head: tuple[str, ...] = ()

    @property
    def tensors(self) -> Renamed:
        """The tensors under their new names."""
        return Renamed(self.source, self.names)

    def edit(self, name: str, **changes: Any) -> None:
        """Change values of a document."""
        before = self.documents.get(name, dict(self.source.config(name)))
        self.documents[name] = {**before, **changes}

    def copied(self) -> list[str]:
        """Files that are taken over as they are: right in the folder, and no weights."""
        return [
            name for name in self.source.folder.here()
            if not name.endswith(_NOT_COPIED)
            and name not in self.documents
            and name != MANIFEST
            and not name.startswith(".")
        ]  # fmt: skip

    def as_source(self) -> Source:
        """The draft as what it will be."""
        before = self.source.recognised
        weights = _weights(before.weights, self.names)
        listing = _listing(self.source.folder, self.copied(), self.documents, weights)
        folder = Folder(self.source.folder.root, _documents=dict(self.documents), _listing=listing)
        if weights.index is not None:
            total = {"metadata": {"total_size": weights.nbytes}, "weight_map": dict(weights.index)}
            folder._documents[index_of(weights.single)] = total
        kind = Kind.MODEL if self.head and before.kind is Kind.VALUE else before.kind
        return replace(
            self.source, folder=folder, values=False,
            recognised=Recognised(kind, before.what, before.dialect, weights),
        )  # fmt: skip


def begin(source: Source) -> Draft:
    """A draft of the folder as it is, from whichever set of its weights is whole."""
    other = other_set(source)
    if other is not None and whole_beside(source):
        done = [f"weights of {other.single}: those of {source.weights.single} are not whole"]
        source = replace(source, recognised=replace(source.recognised, weights=other))
    else:
        done = []
    draft = Draft(source, {key: key for key in source.tensors}, done=done)
    if source.weights.is_pickled and source.tensors:
        draft.done.append(f"{source.weights.single} as safetensors")
    left = [
        name for name in source.folder.here()
        if name.endswith((".safetensors", ".bin"))
        and name not in (*source.weights.files, *SIDE_FILES, *_NOT_WEIGHTS)
    ]  # fmt: skip
    draft.done += [f"left out {name}" for name in left]
    if _index_is_wrong(source.weights):
        draft.done.append(f"{index_of(source.weights.single)} written anew")
    return draft


_NOT_WEIGHTS = ("training_args.bin",)


def _index_is_wrong(weights: Weights) -> bool:
    places = {key: one.file for key, one in weights.tensors.items()}
    alone = weights.index is None and len(weights.files) > 1
    return alone or (weights.index is not None and dict(weights.index) != places)


def _weights(before: Weights, names: Mapping[str, str]) -> Weights:
    """The same files with tensors under new names; its index says where they are."""
    tensors = {new: before.tensors[old] for new, old in names.items()}
    single = before.single.rpartition(".")[0].replace("pytorch_model", "model") + ".safetensors"
    several = len(before.files) > 1
    return replace(
        before, single=single, tensors=tensors, others={},
        index={key: one.file for key, one in tensors.items()} if several else None,
        files=tuple(dict.fromkeys(one.file for one in tensors.values())),
    )  # fmt: skip


def _listing(
    folder: Folder, copied: list[str], documents: Mapping[str, object], weights: Weights
) -> Listing:
    files = {name: folder.files[name] for name in copied}
    files |= dict.fromkeys(documents, 1)
    files |= {name: folder.files[name] for name in weights.files}
    if weights.index is not None:
        files[index_of(weights.single)] = 1
    return Listing(files, (), {}, "")
