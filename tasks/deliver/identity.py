"""Which base an adapter belongs to, and whether the one that was given is that one.

A base of the same shape that is another model (the instruct one for the plain one) fits by every
name and every shape, so it has to be recognised by what was written down: the digest in our own
manifests, the name in adapter_config.json, the name of the folder in the local hub cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.deliver.recognise import ADAPTER_CONFIG, CONFIG, Given, read_manifest
from tasks.doctor.same_bytes import first_difference
from tasks.doctor.source import open_source
from tasks.errors import ArtifactError, ConfigError
from tasks.weights.opening import open_model
from tasks.weights.reader import read_json

_SAMPLES, _SAMPLE = 16, 4096
_HUB = re.compile(r"models--(.+)")


def find_base(given: Given, base: str | None, store: Path) -> Path | None:
    """The folder of the base: the one that was given, or the one that SOURCE names.

    Args:
        given: SOURCE.
        base: the setting; None to look for it.
        store: our artifacts, among which a recorded digest may be found.

    Raises:
        ConfigError: a folder that is none.
    """
    if base is not None:
        folder = Path(base).expanduser().absolute()
        if not (folder / CONFIG).is_file():
            what = f"no {CONFIG} in it" if folder.is_dir() else "no such folder"
            raise ConfigError(f"base={base}: {what}", hint="base=<folder of the base model>")
        return folder
    digest = recorded_digest(given)
    original = published(digest, store, "base") if digest else None
    if original is not None:
        return original
    named = recorded_name(given)
    if named and Path(named).is_absolute() and (Path(named) / CONFIG).is_file():
        return Path(named)
    return None


def base_missing(given: Given) -> ConfigError:
    """What to say when an adapter's base is not known."""
    named = recorded_name(given) or "no model"
    return ConfigError(
        f"source={given.root} is {given.what}: its base is needed",
        details=[f"{ADAPTER_CONFIG} names {named}, which is no local folder"],
        hint="base=<folder of the base model>",
    )


def base_findings(given: Given, base: Path, store: Path) -> Iterator[str]:
    """What tells that `base` is not the base of SOURCE; the surest record decides."""
    recorded, manifest = recorded_digest(given), read_manifest(base)
    if recorded and manifest:
        if manifest["digest"] != recorded:
            yield f"trained on the base {recorded[:12]}, {base} is {manifest['digest'][:12]}"
        return
    original = published(recorded, store, "base") if recorded else None
    if original is not None:
        if sample(original) != sample(base):
            yield f"trained on {original}; the weights in {base} are others"
        return
    name = recorded_name(given)
    if not name:
        return
    local = Path(name)
    if local.is_absolute() and (local / CONFIG).is_file():
        if sample(local) != sample(base):
            yield f"trained on {name}; the weights in {base} are others"
        return
    for called in names_of(base):
        if _contradicts(name, called):
            yield f"trained on {name}; {base} says it is {called}"
            return


def equals_base(given: Given, base: Path) -> bool:
    """Return True if a full model's tensors are all the base's, bit for bit.

    Little is read of a model that training changed: the comparison ends at the first difference.
    """
    source, original = open_source(given.root), open_source(base)
    ours, theirs = source.tensors, original.tensors
    if {key: (one.shape, one.dtype) for key, one in ours.items()} != {
        key: (theirs[key].shape, theirs[key].dtype) for key in ours if key in theirs
    }:
        return False
    return bool(ours) and first_difference(source, original, ours) is None


def published(digest: str, store: Path, kind: str) -> Path | None:
    """The artifact of that kind and digest, if it is in the store."""
    for path in sorted((store / kind).glob("*")):
        if read_manifest(path).get("digest") == digest:
            return path
    return None


def recorded_digest(given: Given) -> str:
    """Digest of the base that training recorded; "" where nothing says."""
    if given.kind == "shards":
        return str(_optional(given.root / "train.json").get("base_digest", ""))
    return str(given.manifest.get("inputs", {}).get("base", ""))


def recorded_name(given: Given) -> str:
    """Name or path of the base as PEFT recorded it; "" where nothing says."""
    return str(_optional(given.root / ADAPTER_CONFIG).get("base_model_name_or_path") or "")


def names_of(base: Path) -> Iterator[str]:
    """What a folder says of which model it is: config.json, the hub's cache, its own name."""
    said = _optional(base / CONFIG).get("_name_or_path")
    if isinstance(said, str) and said and not said.startswith(("/", ".")):
        yield said
    for part in base.resolve().parts:
        if match := _HUB.fullmatch(part):
            yield match[1].replace("--", "/")
    yield base.name


def _contradicts(recorded: str, called: str) -> bool:
    """Two hub names that differ; or two names of which one only adds to the other."""
    one, other = (text.rstrip("/").lower() for text in (recorded, called))
    if "/" in one and "/" in other:
        return one != other
    one, other = one.rpartition("/")[2], other.rpartition("/")[2]
    return one != other and (one.startswith(f"{other}-") or other.startswith(f"{one}-"))


def sample(folder: Path) -> str:
    """A hash over the headers and some places of every weight file: tells models apart.

    Two checkpoints of one architecture differ nearly everywhere; that a change missed every one of
    these places is a change of a few tensors alone, which the other records have to tell.

    Raises:
        ArtifactError: no checkpoint.
    """
    digest = hashlib.sha256()
    source = open_model(folder)
    for name, info in sorted(source.tensors.items()):
        digest.update(f"{name} {info.shape} {info.dtype}".encode())
        for extent in source.extents(name):
            with extent.path.open("rb") as file:
                step = max(1, extent.nbytes // _SAMPLES)
                for at in range(0, extent.nbytes, step):
                    file.seek(extent.start + at)
                    digest.update(file.read(min(_SAMPLE, extent.nbytes - at)))
    return digest.hexdigest()


def folder_identity(folder: Path) -> str:
    """sha256 that stands for a folder that is no artifact: names, sizes, times of its files.

    Ours keep the digest of their manifest instead.
    """
    manifest = read_manifest(folder)
    if manifest:
        return str(manifest["digest"])
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        stat = path.stat()
        files.append([str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns, stat.st_ino])
    text = json.dumps([str(folder.resolve()), files])
    return hashlib.sha256(text.encode()).hexdigest()


def _optional(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) if path.is_file() else {}
    except ArtifactError:
        return {}  # whoever needs the file says what is wrong with it
