"""Inspect a Hugging Face model folder: the files of the model, and every problem with them.

Reads headers only. All problems are collected, so a broken download needs one look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json
from tasks.weights.files.header import read_header
from tasks.weights.files.index import is_plain_name, weight_files
from tasks.weights.files.side_files import PROCESSORS, TOKENIZER, side_files

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
BESIDE = (CONFIG, "generation_config.json", INDEX, *TOKENIZER, *PROCESSORS)
"""Names of the files that belong to a model beside its weights, as patterns."""


@dataclass
class ModelFolder:
    """Content of a model folder.

    Attributes:
        files: files of the model by name: config.json, weights, and side files of the allowlist.
        tensors: number of tensors.
        bytes: size of all tensors in bytes.
        checks: one verdict for each weight file.
        problems: reasons why the folder cannot be used, one line each.
    """

    files: dict[str, Path] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    checks: list[Check] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def verdicts(self) -> tuple[Check, ...]:
        """Return the checks of the files, and a failed one for each problem."""
        unusable = (Check("folder", "usable", text, ok=False) for text in self.problems)
        return (*self.checks, *unusable)


def inspect_checkpoint(folder: Path) -> ModelFolder:
    """Inspect a model folder: config.json, tokenizer, and the header of every weight file."""
    checkpoint = ModelFolder()
    try:
        checkpoint.files = {path.name: path for path in side_files(folder, BESIDE)}
    except ArtifactError as error:
        checkpoint.problems.append(error.message)
    _check_config(folder, checkpoint)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        checkpoint.problems.append(f"no tokenizer: none of {', '.join(TOKENIZERS)}")
    weight_map = _weight_map(folder, checkpoint)
    for name in sorted(set(weight_map.values())):
        _check_weights(folder / name, weight_map, checkpoint)
    return checkpoint


def _check_config(folder: Path, checkpoint: ModelFolder) -> None:
    if not (folder / CONFIG).is_file():
        adapter = (folder / "adapter_config.json").is_file()
        kind = ": this is an adapter; name the base model it belongs to" if adapter else ""
        checkpoint.problems.append(f"no {CONFIG}{kind}")
        return
    config = _json(folder / CONFIG, checkpoint)
    if config is not None and "model_type" not in config:
        checkpoint.problems.append(f"{CONFIG} has no model_type")


def _weight_map(folder: Path, checkpoint: ModelFolder) -> dict[str, str]:
    """Return the file name by tensor name, from the index or from the only file's header."""
    if (folder / INDEX).is_file():
        return _indexed(folder, checkpoint)
    if (folder / SINGLE).is_file():
        checkpoint.files[SINGLE] = folder / SINGLE
        try:
            return dict.fromkeys(read_header(folder / SINGLE).tensors, SINGLE)
        except ArtifactError as error:
            checkpoint.problems.append(error.message)
            return {}
    pickles = [path.name for path in weight_files(folder, *PICKLES)]
    strays = [path.name for path in weight_files(folder, "*.safetensors")]
    if strays:
        checkpoint.problems.append(f"{strays[0]} is not {SINGLE}, and there is no {INDEX}")
    elif pickles:
        checkpoint.problems.append(
            f"weights only as pickles ({', '.join(pickles[:3])}), which can run code when loaded; "
            "save them as safetensors: save_pretrained of transformers 5 does"
        )
    else:
        checkpoint.problems.append(f"no weights: neither {SINGLE} nor {INDEX}")
    return {}


def _indexed(folder: Path, checkpoint: ModelFolder) -> dict[str, str]:
    index = _json(folder / INDEX, checkpoint)
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if index is not None:
            checkpoint.problems.append(f"{INDEX} has no weight_map")
        return {}
    present = {}
    for name in sorted({str(file) for file in weight_map.values()}):
        if not is_plain_name(name):
            checkpoint.problems.append(f"{INDEX} points outside the folder: {name[:200]!r}")
        elif (folder / name).is_file():
            checkpoint.files[name] = folder / name
            present[name] = True
        else:
            checkpoint.problems.append(f"{INDEX} names {name}, which is not there")
    return {str(t): str(file) for t, file in weight_map.items() if str(file) in present}


def _check_weights(path: Path, weight_map: dict[str, str], checkpoint: ModelFolder) -> None:
    """Compare the tensors of one file with those that the index assigns to it."""
    try:
        header = read_header(path)
    except ArtifactError as error:
        if error.message not in checkpoint.problems:
            checkpoint.problems.append(error.message)
        return
    wanted = {tensor for tensor, file in weight_map.items() if file == path.name}
    have = set(header.tensors)
    checkpoint.tensors += len(have)
    checkpoint.bytes += sum(info.nbytes for info in header.tensors.values())
    odd = sorted(wanted ^ have)
    verdict = f"{len(have)} tensors" + (f", differing in {odd[0]}" if odd else "")
    checkpoint.checks.append(Check(path.name, f"{len(wanted)} tensors", verdict, ok=not odd))


def _json(path: Path, checkpoint: ModelFolder) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except ArtifactError as error:
        checkpoint.problems.append(error.message.removeprefix(f"{path.parent}/"))
        return None
