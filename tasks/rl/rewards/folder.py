"""A reward model's folder, looked at without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json
from tasks.weights.heads.folder import architectures
from tasks.weights.heads.normalisation import Normalisation, normalisation_from

ROW_TOKENS = 8192
"""Tokens of a packed row at most; a longer text has one to itself."""
CLASSIFIER = "ForSequenceClassification"
EXAMPLE = "reward.model=<the artifact of kind `served` of a chain with train=reward>"
DELIVER = "python flows/deliver.py source=<it> out=<folder> makes one that is"


@dataclass(frozen=True)
class RewardFolder:
    """What a reward model's folder says of itself.

    Attributes:
        path: the folder.
        dtype: torch name of its parameters' dtype.
        normalisation: of its rewards.
        context: longest text, in tokens; None where it does not say.
    """

    path: Path
    dtype: str
    normalisation: Normalisation
    context: int | None

    @classmethod
    def read(cls, path: Path, *, normalize: bool) -> RewardFolder:
        """Look into it.

        Args:
            path: the folder.
            normalize: whether mean and deviation are needed.

        Raises:
            ArtifactError: it is no folder of a reward model with one label, or lacks them.
        """
        if not (path / "config.json").is_file():
            raise ArtifactError(f"reward.model={path} is no model: no config.json", hint=EXAMPLE)
        config = read_json(path / "config.json")
        classes = architectures(config)
        if not classes or not classes[0].endswith(CLASSIFIER):
            what = classes[0] if classes else "no class"
            raise ArtifactError(
                f"reward.model={path} is no *{CLASSIFIER}: its config.json says {what}",
                hint=f"{EXAMPLE}; {DELIVER}",
            )
        if (labels := _labels(config)) != 1:
            raise ArtifactError(
                f"reward.model={path} has {labels} labels; a reward is one number", hint=EXAMPLE
            )
        normalisation, findings = normalisation_from(config)
        if findings:
            raise ArtifactError(f"reward.model={path}: {findings[0]}", details=findings)
        if normalize and not normalisation.is_there:
            raise ArtifactError(
                f"reward.model={path}: no mean and std of its rewards in config.json",
                hint="reward.normalize=false takes its scores as they are",
            )
        text = config.get("text_config") or config  # a multimodal model nests its decoder's
        return cls(
            path,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            normalisation=normalisation,
            context=text.get("max_position_embeddings"),
        )


def _labels(config: Mapping[str, Any]) -> int:
    """As transformers counts them, whose default is two."""
    if isinstance(config.get("id2label"), dict):
        return len(config["id2label"])
    return int(config.get("num_labels", 2))
