"""Open a folder that may contain a head: configuration and headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.adapters.read import read_adapter
from tasks.weights.files.documents import read_json
from tasks.weights.files.header import read_header
from tasks.weights.files.reader import Checkpoint, read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import MODEL as PICKLED
from tasks.weights.pickled.state import is_pickled_model, read_model, read_state

MODEL, ADAPTER, HEAD = "model", "adapter", "head"
"""Names of inputs in plans: weights of a model, weights of an adapter, a separate head file."""
SIDE_FILES = ("value_head.safetensors", "value_head.bin")


@dataclass(frozen=True)
class HeadFolder:
    """Content of a model folder or adapter folder.

    Attributes:
        root: the folder.
        config: content of config.json; empty if there is none.
        adapter_config: content of adapter_config.json; None if the folder is not an adapter.
        sources: sources by name: `MODEL` or `ADAPTER`, and `HEAD` if a head has its own file.
        beside: names of the files with a head beside the weights.
        findings: problems of the folder, one line each.
    """

    root: Path
    config: Mapping[str, Any]
    adapter_config: Mapping[str, Any] | None
    sources: Mapping[str, Source]
    beside: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def weights(self) -> str:
        """Name of the main input: `MODEL` or `ADAPTER`."""
        return MODEL if self.adapter_config is None else ADAPTER


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the class names in config.json; empty if the entry is not a list."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the last hidden state from config.json; None if it is not stated."""
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    size = fields.get("hidden_size", fields.get("n_embd"))
    return size if type(size) is int and size > 0 else None


def read_folder(root: Path) -> HeadFolder:
    """Read a model folder or an adapter folder of any dialect, headers only.

    Raises:
        ArtifactError: the folder is neither of the two, or its weights cannot be read.
    """
    config = read_json(root / "config.json") if (root / "config.json").is_file() else {}
    is_adapter = (root / "adapter_config.json").is_file()
    if not is_adapter and not config:
        raise ArtifactError(f"{root}: neither config.json nor adapter_config.json: no model here")
    # TRL saves the head of a PEFT model under the file name of a full model.
    names = (*SIDE_FILES, PICKLED) if is_adapter else SIDE_FILES
    beside = tuple(name for name in names if (root / name).is_file())
    sources: dict[str, Source] = {}
    if is_adapter:
        sources[ADAPTER] = read_adapter(root, beside=beside).tensors
    else:
        sources[MODEL] = _model(root, beside)
    findings = []
    if beside:
        sources[HEAD] = _single_file(root / beside[0])
        if len(beside) > 1:
            findings.append(f"{' and '.join(beside)}: two files with a head: keep one of them")
    return HeadFolder(
        root,
        config,
        read_json(root / "adapter_config.json") if is_adapter else None,
        sources,
        beside,
        tuple(findings),
    )


def _model(root: Path, beside: Sequence[str]) -> Source:
    if is_pickled_model(root):
        return read_model(root, beside=beside)
    return read_checkpoint(root, beside=beside)


def _single_file(path: Path) -> Source:
    if path.suffix != ".safetensors":
        return read_state(path)
    header = read_header(path)
    files = dict.fromkeys(header.tensors, path.name)
    return Checkpoint(path.parent, header.tensors, files)
