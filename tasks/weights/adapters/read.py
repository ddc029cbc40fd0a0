"""Open a PEFT folder: configuration and headers, no tensor data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.adapters.config import AdapterConfig, parse_config
from tasks.weights.files.index import weight_files
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.reader import ADAPTER, read_checkpoint, read_json
from tasks.weights.files.source import Renamed, Source
from tasks.weights.pickled.state import read_state

CONFIG = "adapter_config.json"
PICKLED = f"{ADAPTER}.bin"


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on disk.

    Attributes:
        root: its folder.
        name: its name in plans; operands of its terms are "<name>:<key>".
        config: its settings.
        tensors: source of its tensors.
        findings: reasons in its configuration why it cannot be merged.
    """

    root: Path
    name: str
    config: AdapterConfig
    tensors: Source
    findings: tuple[str, ...] = ()


def read_adapter(folder: Path, name: str = "adapter", *, beside: Collection[str] = ()) -> Adapter:
    """Open a PEFT folder with `adapter_model.safetensors`, or else `adapter_model.bin`.

    Unsupported settings raise no error here: they are in `findings`, so that one error can list
    them all.

    Args:
        folder: the folder.
        name: name of the adapter in plans.
        beside: names of weight files in the folder that are not part of the adapter.

    Raises:
        ArtifactError: the folder has no adapter, or its files cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"{folder}: no {CONFIG}: not a PEFT adapter",
            hint="give the folder that save_pretrained of the PEFT model wrote",
        )
    config, findings = parse_config(read_json(folder / CONFIG))
    return Adapter(folder, name, config, _tensors(folder, beside), tuple(findings))


def _tensors(folder: Path, beside: Collection[str]) -> Source:
    if (folder / PICKLED).is_file() and not weight_files(
        folder, f"{ADAPTER}*.safetensors", f"{ADAPTER}*.safetensors.index.json"
    ):
        state = read_state(folder / PICKLED)
        return Renamed(state, without_wrappers(state.tensors))
    return read_checkpoint(folder, ADAPTER, beside=beside)
