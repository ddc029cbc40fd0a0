"""A folder with a head somewhere in it: configuration and headers."""

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
"""Names of the inputs in plans: the model's own weights, an adapter's, a head's side file."""
SIDE_FILES = ("value_head.safetensors", "value_head.bin")


@dataclass(frozen=True)
class HeadFolder:
    """What lies in the folder.

    Attributes:
        root: the folder.
        config: config.json; empty when there is none.
        adapter_config: adapter_config.json; None when the folder is no adapter.
        sources: `MODEL` or `ADAPTER`, and `HEAD` where a head lies in a file of its own.
        beside: names of files that hold a head beside the weights.
        findings: what of it cannot be.
    """

    root: Path
    config: Mapping[str, Any]
    adapter_config: Mapping[str, Any] | None
    sources: Mapping[str, Source]
    beside: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def weights(self) -> str:
        """Name of the input that is not a head's side file."""
        return MODEL if self.adapter_config is None else ADAPTER


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Names of classes that config.json gives; none where it says something else there."""
    said = config.get("architectures")
    return [one for one in said if isinstance(one, str)] if isinstance(said, list) else []


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Size of the last hidden state, where the family says it; None where it is not told."""
    text = config.get("text_config")
    said = text if isinstance(text, Mapping) else config
    found = said.get("hidden_size", said.get("n_embd"))
    return found if type(found) is int and found > 0 else None


def read_folder(root: Path) -> HeadFolder:
    """Read a model folder or an adapter folder of any dialect, headers only.

    Raises:
        ArtifactError: neither of the two, or its weights cannot be read.
    """
    config = read_json(root / "config.json") if (root / "config.json").is_file() else {}
    is_adapter = (root / "adapter_config.json").is_file()
    if not is_adapter and not config:
        raise ArtifactError(f"{root}: neither config.json nor adapter_config.json: no model here")
    # TRL saves the head of a PEFT model as if it were the whole model's weights.
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
            findings.append(f"{' and '.join(beside)}: one of them too many")
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
    """One file of tensors, whatever it is called."""
    if path.suffix != ".safetensors":
        return read_state(path)
    header = read_header(path)
    files = dict.fromkeys(header.tensors, path.name)
    return Checkpoint(path.parent, header.tensors, files, {path.name: header})
