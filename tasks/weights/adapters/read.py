"""Reading a PEFT folder: configuration and headers; tensor data stays where it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.adapters.config import AdapterConfig, parse_config
from tasks.weights.files.reader import ADAPTER, open_checkpoint, read_json
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import read_state

CONFIG = "adapter_config.json"
PICKLED = f"{ADAPTER}.bin"


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter on disk.

    Attributes:
        root: its folder.
        name: what plans call it: operands of its terms are "<name>:<key>".
        config: the settings that decide what it does.
        tensors: where its tensors are.
        findings: what in the configuration rules it out.
    """

    root: Path
    name: str
    config: AdapterConfig
    tensors: Source
    findings: tuple[str, ...] = ()


def read_adapter(folder: Path, name: str = "adapter", *, beside: Collection[str] = ()) -> Adapter:
    """Open a PEFT folder: `adapter_model.safetensors`, or `adapter_model.bin` where that is absent.

    Args:
        folder: where it lies.
        name: what plans are to call it.
        beside: weight files in it that the caller knows, and reads otherwise.

    Raises:
        ArtifactError: no adapter there, or its files cannot be read. What the configuration asks
            for and is not possible is no error yet: it is in `findings`, for one error with all.
    """
    if not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"{folder}: no {CONFIG}: this is no PEFT adapter",
            hint="give the folder that save_pretrained of the PEFT model wrote",
        )
    config, findings = parse_config(read_json(folder / CONFIG))
    return Adapter(folder, name, config, _tensors(folder, beside), tuple(findings))


def _tensors(folder: Path, beside: Collection[str]) -> Source:
    if (folder / PICKLED).is_file() and not any(folder.glob(f"{ADAPTER}*.safetensors*")):
        return read_state(folder / PICKLED)
    with open_checkpoint(folder, ADAPTER, beside=beside) as checkpoint:
        return checkpoint
