"""Read a reward model's folder without loading the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.disk import file_stats
from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json
from tasks.weights.files.side_files import require_own_files
from tasks.weights.heads import Normalisation, architectures, normalisation_from

ROW_TOKENS = 8192
"""Maximum tokens of a packed row; a longer text gets a row of its own."""
CLASSIFIER = "ForSequenceClassification"
EXAMPLE = "reward.model=<the artifact of kind `served` of a chain with train=reward>"
DELIVER = "python flows/deliver.py source=<it> out=<folder> converts a model to that class"


@dataclass(frozen=True)
class RewardFolder:
    """Facts about a reward model from its folder.

    Attributes:
        path: the folder.
        dtype: torch name of its parameters' dtype.
        normalisation: mean and std of its rewards.
        context: maximum number of tokens; None if config.json does not say.
    """

    path: Path
    dtype: str
    normalisation: Normalisation
    context: int | None

    @classmethod
    def read(cls, path: Path, *, normalize: bool) -> RewardFolder:
        """Read config.json; `normalize` requires mean and std.

        Raises an ArtifactError unless it is a reward model with one label.
        """
        if path.is_dir():
            require_own_files(path)
        if not (path / "config.json").is_file():
            raise ArtifactError(
                f"reward.model={path} is not a model folder: no config.json", hint=EXAMPLE
            )
        config = read_json(path / "config.json")
        classes = architectures(config)
        if not classes or not classes[0].endswith(CLASSIFIER):
            what = classes[0] if classes else "no class"
            raise ArtifactError(
                f"reward.model={path} is not a *{CLASSIFIER}: its config.json says {what}",
                hint=f"{EXAMPLE}; {DELIVER}",
            )
        if (labels := _labels(config)) != 1:
            raise ArtifactError(
                f"reward.model={path} has {labels} labels; a reward model has one", hint=EXAMPLE
            )
        normalisation = normalisation_from(config, f"reward.model={path}")
        if normalize and not normalisation.is_there:
            raise ArtifactError(
                f"reward.model={path}: no mean and std of its rewards in config.json",
                hint="reward.normalize=false uses its scores unchanged",
            )
        text = config.get("text_config") or config  # nested in multimodal models
        return cls(
            path,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            normalisation=normalisation,
            context=text.get("max_position_embeddings"),
        )


def _labels(config: Mapping[str, Any]) -> int:
    """Return the number of labels as transformers counts them; its default is 2."""
    if isinstance(config.get("id2label"), dict):
        return len(config["id2label"])
    return int(config.get("num_labels", 2))


def model_digest(folder: Path) -> str:
    """Return the digest of a reward model's folder."""
    return hashlib.sha256("\n".join(folder_identity(folder.expanduser())).encode()).hexdigest()


def folder_identity(folder: Path) -> list[str]:
    """Return the digest of a folder's manifest, else sizes, times and inodes of its files."""
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return [hashlib.sha256(manifest.read_bytes()).hexdigest()]
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return [f"{path.name} {file_stats(path)}" for path in files]
