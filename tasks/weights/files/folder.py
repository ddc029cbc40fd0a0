"""A Hugging Face model folder: which of its files make the model, and what is wrong with it.

Only headers are read. Every finding is collected, so that a broken download is told at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import parse_json
from tasks.weights.files.header import read_header
from tasks.weights.files.index import is_plain_name

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_WEIGHTS = (
    ".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx",
)  # fmt: skip
"""Weights beside the ones that the index names: engines that go by glob would load them too."""
NOT_THE_MODEL = ("manifest.json", "contract.json")
"""What an artifact says about itself; a served artifact may be the next chain's base."""


@dataclass
class Checkpoint:
    """What a model folder holds.

    Attributes:
        files: files that make the model, by name.
        tensors: number of tensors.
        bytes: size of the tensors together.
        checks: one verdict a weight file.
        problems: what makes the folder unusable; empty when it is fine.
    """

    files: dict[str, Path] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    checks: list[Check] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """Look through a model folder: config, tokenizer, and every weight file's header."""
    found = Checkpoint()
    for path in sorted(folder.iterdir()):
        if path.is_file() and _belongs(path):
            found.files[path.name] = path
    _check_config(folder, found)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        found.problems.append(f"no tokenizer: none of {', '.join(TOKENIZERS)}")
    weight_map = _weight_map(folder, found)
    for name in sorted(set(weight_map.values())):
        _check_weights(folder / name, weight_map, found)
    return found


def _belongs(path: Path) -> bool:
    """Whether a file that holds no weights is part of the model."""
    foreign = path.suffix in (*OTHER_WEIGHTS, ".fp") or path.name in NOT_THE_MODEL
    return not foreign and not path.name.startswith(".")


def _check_config(folder: Path, found: Checkpoint) -> None:
    if not (folder / CONFIG).is_file():
        adapter = (folder / "adapter_config.json").is_file()
        kind = ": this is an adapter; name the base model it belongs to" if adapter else ""
        found.problems.append(f"no {CONFIG}{kind}")
        return
    config = _json(folder / CONFIG, found)
    if config is not None and "model_type" not in config:
        found.problems.append(f"{CONFIG} has no model_type")


def _weight_map(folder: Path, found: Checkpoint) -> dict[str, str]:
    """File name by tensor name; from the index, or from the one file's header."""
    if (folder / INDEX).is_file():
        return _indexed(folder, found)
    if (folder / SINGLE).is_file():
        found.files[SINGLE] = folder / SINGLE
        try:
            return dict.fromkeys(read_header(folder / SINGLE).tensors, SINGLE)
        except ArtifactError as error:
            found.problems.append(error.message)
            return {}
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    strays = sorted(path.name for path in folder.glob("*.safetensors"))
    if strays:
        found.problems.append(f"{strays[0]} is not {SINGLE}, and there is no {INDEX}")
    elif pickles:
        found.problems.append(
            f"weights only as pickles ({', '.join(pickles[:3])}), which can run code when loaded; "
            "save them as safetensors: save_pretrained of transformers 5 does"
        )
    else:
        found.problems.append(f"no weights: neither {SINGLE} nor {INDEX}")
    return {}


def _indexed(folder: Path, found: Checkpoint) -> dict[str, str]:
    index = _json(folder / INDEX, found)
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if index is not None:
            found.problems.append(f"{INDEX} has no weight_map")
        return {}
    present = {}
    for name in sorted({str(file) for file in weight_map.values()}):
        if not is_plain_name(name):
            found.problems.append(f"{INDEX} points outside the folder: {name[:200]!r}")
        elif (folder / name).is_file():
            found.files[name] = folder / name
            present[name] = True
        else:
            found.problems.append(f"{INDEX} names {name}, which is not there")
    return {str(t): str(file) for t, file in weight_map.items() if str(file) in present}


def _check_weights(path: Path, weight_map: dict[str, str], found: Checkpoint) -> None:
    """One file's tensors have to be the ones that the index places in it."""
    try:
        header = read_header(path)
    except ArtifactError as error:
        if error.message not in found.problems:
            found.problems.append(error.message)
        return
    wanted = {tensor for tensor, file in weight_map.items() if file == path.name}
    have = set(header.tensors)
    found.tensors += len(have)
    found.bytes += sum(info.nbytes for info in header.tensors.values())
    odd = sorted(wanted ^ have)
    verdict = f"{len(have)} tensors" + (f", differing in {odd[0]}" if odd else "")
    found.checks.append(Check(path.name, f"{len(wanted)} tensors", verdict, ok=not odd))


def _json(path: Path, found: Checkpoint) -> dict[str, Any] | None:
    try:
        document = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        found.problems.append(f"{path.name} cannot be read: {error}")
        return None
    if not isinstance(document, dict):
        found.problems.append(f"{path.name} is not a JSON object")
        return None
    return document
