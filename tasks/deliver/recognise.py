"""What SOURCE is: told from names of files and from manifests, in one line for a person.

given = recognise(Path("ckpt/checkpoint-500"))
given.line()      "a PEFT adapter (adapter_model.safetensors)"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.errors import ConfigError
from tasks.weights.deepspeed.layout import is_checkpoint
from tasks.weights.index import index_of
from tasks.weights.partitions import PARTITIONS
from tasks.weights.pickled.state import MODEL as PICKLED
from tasks.weights.reader import ADAPTER, MANIFEST, WEIGHTS

Kind = Literal["adapter", "model", "shards", "deepspeed"]
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_OURS: Mapping[str, Kind] = {
    "shards": "shards",
    "adapter": "adapter",
    "weights": "model",
    "served": "model",
    "base": "model",
}
_FILES: Mapping[Kind, str] = {
    "adapter": f"{ADAPTER_CONFIG} and {ADAPTER}.safetensors or {ADAPTER}.bin",
    "model": f"{CONFIG} and {WEIGHTS}.safetensors, or {PICKLED}, or the index of either",
    "shards": f"{PARTITIONS} and shards/rank-*.safetensors",
    "deepspeed": "*_model_states.pt, in the folder or in global_step*/",
}


@dataclass(frozen=True)
class Given:
    """A recognised SOURCE.

    Attributes:
        kind: what it is.
        root: its folder.
        what: the same for a person, without the folder.
        manifest: our manifest, where it has one; else empty.
        beside: what else lies in the folder and is left alone.
    """

    kind: Kind
    root: Path
    what: str
    manifest: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    def line(self) -> str:
        """One line: folder, what it is, what is left alone."""
        rest = f"; left alone: {', '.join(self.beside)}" if self.beside else ""
        return f"{self.root}: {self.what}{rest}"


def recognise(root: Path) -> Given:
    """Look at a folder's file names and its manifest.

    A folder that holds finished weights and a trainer's states (as Trainer leaves it) is the
    finished weights; the folder of the step itself names the states.

    Raises:
        ConfigError: nothing that is known, with what was looked for.
    """
    if not root.is_dir():
        raise ConfigError(f"source={root}: no such folder", hint="source=<folder>")
    manifest = read_manifest(root)
    if manifest:
        kind = _OURS.get(manifest["kind"])
        if kind is None:
            raise ConfigError(
                f"source={root}: an artifact of kind {manifest['kind']}, which holds no weights",
                hint=f"source=<an artifact of kind {', '.join(_OURS)}>",
            )
        return Given(kind, root, f"our artifact of kind {manifest['kind']}", manifest)
    found = {kind: what for kind, look in _LOOKS.items() if (what := look(root))}
    if not found:
        raise ConfigError(
            f"source={root}: neither adapter nor model, shards nor DeepSpeed checkpoint",
            details=[*(f"{kind}: {files}" for kind, files in _FILES.items()), _there(root)],
            hint="source=<the folder that holds these files>",
        )
    kind, *others = found
    return Given(kind, root, found[kind], {}, tuple(found[other] for other in others))


def read_manifest(root: Path) -> dict[str, Any]:
    """A manifest of ours; empty when there is none (other tools have files of that name)."""
    try:
        document = json.loads((root / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    known = {"kind", "digest", "tensors", "files", "inputs", "notes"}
    return document if isinstance(document, dict) and known <= set(document) else {}


def _adapter(root: Path) -> str:
    if not (root / ADAPTER_CONFIG).is_file():
        return ""
    names = (f"{ADAPTER}.safetensors", f"{ADAPTER}.safetensors.index.json", f"{ADAPTER}.bin")
    name = next((one for one in names if (root / one).is_file()), "")
    return f"a PEFT adapter ({name})" if name else ""


def _model(root: Path) -> str:
    if not (root / CONFIG).is_file():
        return ""
    names = (
        f"{WEIGHTS}.safetensors",
        f"{WEIGHTS}.safetensors.index.json",
        PICKLED,
        index_of(PICKLED),
    )
    name = next((one for one in names if (root / one).is_file()), "")
    return f"a full model ({name})" if name else ""


def _shards(root: Path) -> str:
    return "shards of our own ranks" if (root / PARTITIONS).is_file() else ""


def _deepspeed(root: Path) -> str:
    return "a DeepSpeed checkpoint" if is_checkpoint(root) else ""


_LOOKS: Mapping[Kind, Callable[[Path], str]] = {
    "shards": _shards,
    "adapter": _adapter,
    "model": _model,
    "deepspeed": _deepspeed,
}
"""In the order in which they win."""


def _there(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"found: {', '.join(names[:8]) or 'nothing'}{more}"
