"""Read the folder of a model, and the record that training left in its `shards` artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core import machine
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import open_artifact
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.files.folder import PROCESSORS, TOKENIZER, copy_side_file, side_files
from tasks.weights.files.reader import weight_files
from tasks.weights.heads import Normalisation
from tasks.weights.model_class import only_bf16

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def dtype_of(folder: Path) -> str:
    """Return the torch dtype name in a model's config.json (key `torch_dtype` in older files)."""
    config = read_json(folder / CONFIG)
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def computing_dtype_of(folder: Path) -> str:
    """Return the torch name of the dtype in which this machine computes a model."""
    if only_bf16(read_json(folder / CONFIG)):
        return dtype_of(folder)
    size = sum(file.stat().st_size for file in weight_files(folder, "*.safetensors"))
    return machine.computing_dtype(dtype_of(folder), size)


def context_of(folder: Path) -> int:
    """Return the context length of a model in tokens, from its config.json."""
    config = read_json(folder / CONFIG)
    text = config.get("text_config") or config
    return int(text.get("max_position_embeddings") or 1 << 30)


@dataclass(frozen=True)
class Trained:
    """The record that training left: `train.json` and `config.json` of its artifact."""

    root: Path
    quantization: Mapping[str, Any] | None  # of the base in training; None for none
    base_digest: str
    dtype: str  # torch dtype name of the model in training
    config: Mapping[str, Any]  # config.json of the trained model, without quantization
    attn_implementation: str  # of training, by transformers' name; others round differently
    objective: str
    texts: bool  # True if training used raw texts, which need no chat template
    normalisation: Normalisation | None  # of a reward model's scores; None otherwise

    @property
    def is_reward(self) -> bool:
        """Return True if a reward model was trained, with a score head."""
        return self.objective == "reward"

    @classmethod
    def read(cls, root: Path) -> Trained:
        """Read from a `shards` artifact. Raises ArtifactError."""
        record, config = read_json(root / "train.json"), read_json(root / CONFIG)
        if missing := sorted({"quantization", "base_digest"} - set(record)):
            raise ArtifactError(f"{root}/train.json lacks {', '.join(missing)}")
        config.pop("quantization_config", None)  # that of training; trained weights have none
        scores = record.get("scores")
        return cls(
            root,
            record["quantization"],
            record["base_digest"],
            dtype_of(root),
            config,
            str(record.get("attn_implementation", "sdpa")),
            str(record.get("objective", "sft")),
            bool(record.get("texts", False)),
            Normalisation(scores["mean"], scores["std"]) if scores else None,
        )

    def require_base(self, base: Path) -> None:
        """Refuse a base other than the one that was trained. Raises ArtifactError."""
        digest = open_artifact(base).digest
        if digest != self.base_digest:
            raise ArtifactError(
                f"wrong base: {self.base_digest[:12]} was trained, {base} is {digest[:12]}",
                hint="give the base that was trained, or train again: force=[train]",
            )

    def copy_side_files(self, out: Path, *, config: bool) -> None:
        """Copy the tokenizer and generation config of training into `out`."""
        files = side_files(self.root / "tokenizer", (*TOKENIZER, *PROCESSORS))
        if not files:
            raise ArtifactError(f"{self.root}/tokenizer: no tokenizer files")
        for path in (*files, self.root / GENERATION_CONFIG):
            copy_side_file(path, out / path.name)
        if config:
            write_json(out / CONFIG, self.config)
