"""Inspect a Hugging Face model folder: the files of the model, and every problem with them.

Reads headers only. All problems are collected, so a broken download needs one look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import OTHER_WEIGHTS, index_of, read_header, survey, weight_files
from tasks.weights.files.side_files import PROCESSORS, TOKENIZER, side_files

CONFIG = "config.json"
SINGLE = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
BESIDE = (CONFIG, "generation_config.json", index_of(SINGLE), *TOKENIZER, *PROCESSORS)
"""Names of the files that belong to a model beside its weights, as patterns."""


@dataclass
class ModelFolder:
    """Content of a model folder: its files by name, and the reasons why it cannot be used."""

    files: dict[str, Path] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def verdicts(self) -> tuple[Check, ...]:
        """Return a failed check for each problem, or one that says what the folder holds."""
        if self.problems:
            return tuple(Check("folder", "usable", text, ok=False) for text in self.problems)
        text = f"{self.tensors} tensors, {self.bytes} bytes"
        return (Check("folder", text, text, ok=True),)


def inspect_checkpoint(folder: Path) -> ModelFolder:
    """Inspect a model folder: config.json, tokenizer, and the header of every weight file."""
    checkpoint = ModelFolder()
    try:
        checkpoint.files = {path.name: path for path in side_files(folder, BESIDE)}
    except ArtifactError as error:
        checkpoint.problems.append(error.message)
    checkpoint.problems += _config_problems(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        checkpoint.problems.append(f"no tokenizer: none of {', '.join(TOKENIZERS)}")
    if not any((folder / name).is_file() for name in (SINGLE, index_of(SINGLE))):
        checkpoint.problems.append(_no_weights(folder))
        return checkpoint
    others = [path.name for path in weight_files(folder, *OTHER_WEIGHTS)]
    tensors, problems = survey(
        folder, SINGLE, lambda path: read_header(path).tensors, beside=others
    )
    checkpoint.problems += problems
    checkpoint.tensors = len(tensors)
    checkpoint.bytes = sum(tensor.nbytes for tensor in tensors.values())
    paths = sorted({tensor.extents[0].path for tensor in tensors.values()})
    checkpoint.files |= {path.name: path for path in paths}
    return checkpoint


def _config_problems(folder: Path) -> list[str]:
    if not (folder / CONFIG).is_file():
        adapter = (folder / "adapter_config.json").is_file()
        kind = ": this is an adapter; name the base model it belongs to" if adapter else ""
        return [f"no {CONFIG}{kind}"]
    try:
        config = read_json(folder / CONFIG)
    except ArtifactError as error:
        return [error.message.removeprefix(f"{folder}/")]
    return [] if "model_type" in config else [f"{CONFIG} has no model_type"]


def _no_weights(folder: Path) -> str:
    if strays := weight_files(folder, "*.safetensors"):
        return f"{strays[0].name} is not {SINGLE}, and there is no {index_of(SINGLE)}"
    if pickles := weight_files(folder, *PICKLES):
        return (
            f"weights only as pickles ({pickles[0].name}), which can run code when loaded; "
            "save them as safetensors: save_pretrained of transformers 5 does"
        )
    return f"no weights: neither {SINGLE} nor {index_of(SINGLE)}"
