"""Open a checkpoint of torch.distributed.checkpoint (`.metadata`, `*.distcp`) as a `Tensors`.

FSDP2, accelerate and Trainer write one: each rank's shards, one zip file of `torch.save` per shard,
and a table that says which shard has which rows of which tensor. Nothing of it is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.errors import ArtifactError, first_and_more
from tasks.core.files import by_number
from tasks.weights.files.names import parse_peft, unwrap
from tasks.weights.files.tensors import Extent, Tensor, Tensors
from tasks.weights.pickled.torch_file import DTYPES, is_shape, read_torch_file
from tasks.weights.pickled.unpickler import Foreign, Global, PickleError, Walker

METADATA = ".metadata"
_MOST = 512 << 20
_SHOWN = 50
_AGAIN = "copy the files of every rank again, or use another checkpoint"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class DistributedCheckpoint:
    """The model's tensors by live name."""

    tensors: Tensors
    root: Path

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of an adapter's parameters; of a full model, or an adapter alone, all names."""
        names = tuple(self.tensors)
        live = [name for name in names if ".lora_" in name and not parse_peft(unwrap(name))]
        marks = (".lora_", ".modules_to_save.", ".trainable_tokens_delta")
        return tuple(n for n in names if any(mark in n for mark in marks)) if live else names


def read_distributed(folder: Path) -> DistributedCheckpoint:
    """Open a checkpoint; only the table and the headers of the model's shards are read.

    Raises ArtifactError with all findings: missing or damaged shards, tensors that are split along
    another axis than the first.
    """
    root = _find_root(folder)
    entries = _read_table(root / METADATA)
    ends: dict[str, int] = {}
    for file, start, length in (e for entry in entries.values() for e in entry.places.values()):
        ends[file] = max(ends.get(file, 0), start + length)
    findings = [
        f"{root / file}: truncated: a shard ends at byte {end}"
        for file, end in ends.items()
        if (root / file).is_file() and (root / file).stat().st_size < end
    ]
    tensors = {}
    for name, key in _of_model(root, entries).items():
        try:
            tensors[name] = _tensor(root, entries[key])
        except ArtifactError as error:
            findings.append(error.message)
        except ValueError as error:
            findings.append(f"{name}: {error}")
    findings = list(dict.fromkeys(findings))  # a lost file has one line, not one for each tensor
    if findings:
        raise ArtifactError(
            f"{root}: not a complete checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint=_AGAIN,
        )
    return DistributedCheckpoint(tensors, root)


def _find_root(folder: Path) -> Path:
    """Return the folder of the model's table: `folder`, or one below it that is no optimizer's."""
    if (folder / METADATA).is_file():
        return folder
    inside = (path.parent.relative_to(folder) for path in folder.rglob(METADATA))
    models = [path for path in inside if not any(part.startswith("optim") for part in path.parts)]
    if len(models) == 1:
        return folder / models[0]
    if not models:
        raise ArtifactError(f"{folder}: there is no {METADATA}", hint=_AGAIN)
    names = sorted(map(str, models), key=by_number)
    text = f"{folder}: several checkpoints, name one: {', '.join(names)}"
    raise ArtifactError(text, hint=f"source={folder / names[-1]}")


class _Entry(NamedTuple):
    """A tensor in the table."""

    shape: Sizes
    dtype: str
    chunks: list[tuple[Sizes, Sizes]]  # offsets and sizes of its shards
    path: tuple[Any, ...]  # its keys in nested dictionaries
    places: dict[Sizes, tuple[str, int, int]]  # file, start and length of a shard by its offsets


class _Table(Walker):
    def reduce(self, target: Global, args: tuple[Any, ...]) -> Any:
        is_size = target.path == "torch.Size" and len(args) == 1 and is_shape(args[0])
        return tuple(args[0]) if is_size else super().reduce(target, args)


def _read_table(path: Path) -> dict[str, _Entry]:
    """Return the tensors by key, and where their shards are."""
    try:
        if path.stat().st_size > _MOST:
            raise ArtifactError(f"{path}: {path.stat().st_size} bytes, at most {_MOST} are read")
        table = _fields(_Table(path.read_bytes()).value())
        paths = table.get("planner_data") or {}
        entries = {
            key: _entry(key, _fields(value), tuple(paths.get(key) or (key,)))
            for key, value in table["state_dict_metadata"].items()
            if value.kind.endswith(".TensorStorageMetadata")  # others are of the optimizer
        }
        for index, storage in table["storage_data"].items():
            fields, at = _fields(index), _fields(storage)
            if fields.get("offset") is None:
                continue  # not a tensor
            if at.get("transform_descriptors"):
                raise ValueError(f"{fields['fqn']} is compressed or encrypted")
            place = str(at["relative_path"]), int(at["offset"]), int(at["length"])
            entries[fields["fqn"]].places[tuple(fields["offset"])] = place
        return entries
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except PickleError as error:
        raise ArtifactError(f"{path}: {error}", hint=_AGAIN) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        text = f"{path}: not the table of a distributed checkpoint: {error!r}"
        raise ArtifactError(text, hint=_AGAIN) from error


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass in the table."""
    state = value.state if isinstance(value, Foreign) else None
    if not isinstance(state, dict):
        raise TypeError(f"no attributes: {type(value).__name__}")
    return state


def _entry(key: str, fields: Mapping[str, Any], path: tuple[Any, ...]) -> _Entry:
    dtype = fields["properties"].state[0].path.removeprefix("torch.")
    chunks = [_fields(chunk) for chunk in fields["chunks"]]
    sizes = [fields["size"], *(size for chunk in chunks for size in chunk.values())]
    if not all(map(is_shape, sizes)):
        raise ValueError(f"{key}: a shape that is none")
    places = [(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in chunks]
    return _Entry(tuple(fields["size"]), DTYPES.get(dtype, dtype), places, path, {})


def _of_model(root: Path, entries: Mapping[str, _Entry]) -> dict[str, str]:
    """Return keys by live name, of the one dictionary of the checkpoint that is the model's."""
    places: dict[tuple[Any, ...], dict[str, str]] = {}
    for key, entry in entries.items():
        *place, name = entry.path
        if not any(str(part).startswith("optim") for part in place):
            places.setdefault(tuple(place), {})[str(name)] = key
    models = [place for place in places if place[-1:] == ("model",)] or list(places)
    if len(models) != 1:
        names = ", ".join(".".join(map(str, place)) or "(top)" for place in models) or "none"
        raise ArtifactError(
            f"{root}: which of its dictionaries is the model? {names}",
            hint='save it as "model": dcp.save({"model": model.state_dict()}, checkpoint_id=...)',
        )
    return places[models[0]]


def _tensor(root: Path, entry: _Entry) -> Tensor:
    """Join the shards of a tensor along its first axis; each is a zip file of its own."""
    extents: list[Extent] = []
    rows = 0
    for offsets, sizes in sorted(entry.chunks):
        if 0 in sizes:
            continue
        if offsets not in entry.places:
            raise ValueError(f"the shard from {list(offsets)} on is missing")
        file, start, length = entry.places[offsets]
        if Path(file).name != file:
            raise ArtifactError(f"{file}: not a plain file name")
        shard = read_torch_file(root / file, start, start + length)
        if not isinstance(shard, Tensor) or not shard.extents:
            raise ArtifactError(f"{file}: no contiguous tensor at byte {start}")
        if shard.shape != sizes or shard.dtype != entry.dtype:
            have = f"{shard.dtype} {list(shard.shape)}"
            raise ValueError(f"a shard of {have}, expected {list(sizes)}")
        if sizes[1:] != entry.shape[1:]:
            raise ValueError("split along another axis than the first, as tensor parallelism does")
        if any(offsets[1:]) or offsets[:1] not in ((rows,), ()):
            raise ValueError(f"rows from {rows} on are missing, or there twice")
        rows += sizes[0] if sizes else 0
        extents += shard.extents
    if entry.shape and rows != entry.shape[0] and 0 not in entry.shape:
        raise ValueError(f"{rows} of {entry.shape[0]} rows")
    return Tensor(entry.shape, entry.dtype, tuple(extents))
