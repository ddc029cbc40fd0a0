"""Read what training left, and measure drift from it. Shared by gather, merge and convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.verdict import (
    Moved,
    by_noise,
    load_print,
    moved,
    print_in,
    same_arithmetic,
    verdict,
)
from tasks.evaluation.scoring import ModelRef, Score
from tasks.pipeline.artifact import open_artifact
from tasks.weights.files.reader import read_json
from tasks.weights.heads.normalisation import Normalisation

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Trained:
    """The record that training left: `train.json` and `config.json` of its artifact.

    Attributes:
        root: the `shards` artifact.
        quantization: quantization of the base in training; None if it was not quantized.
        base_digest: digest of the base artifact that was trained.
        dtype: torch dtype name of the model in training.
        config: config.json of the trained model, without quantization.
        attn_implementation: attention in training, by transformers' name; others round differently.
        objective: training objective.
        texts: True if training used raw texts, which need no chat template.
        normalisation: mean and standard deviation of a reward model's scores; None otherwise.
    """

    root: Path
    quantization: Mapping[str, Any] | None
    base_digest: str
    dtype: str
    config: Mapping[str, Any]
    attn_implementation: str = "sdpa"
    objective: str = "sft"
    texts: bool = False
    normalisation: Normalisation | None = None

    @property
    def is_reward(self) -> bool:
        """Return True if a reward model was trained, with a score head."""
        return self.objective == "reward"

    @classmethod
    def read(cls, root: Path) -> Trained:
        """Read from a `shards` artifact. Raises ArtifactError."""
        record, config = read_json(root / "train.json"), read_json(root / CONFIG)
        missing = {"quantization", "base_digest"} - set(record)
        if missing:
            raise ArtifactError(f"{root}/train.json lacks {', '.join(sorted(missing))}")
        dtype = config.get("dtype", config.get("torch_dtype"))
        if dtype is None:
            raise ArtifactError(f"{root}/{CONFIG} has no dtype")
        config.pop(
            "quantization_config", None
        )  # that of training; the trained weights are not quantized
        scores = record.get("scores")
        return cls(
            root,
            record["quantization"],
            record["base_digest"],
            str(dtype),
            config,
            attn_implementation=str(record.get("attn_implementation", "sdpa")),
            objective=str(record.get("objective", "sft")),
            texts=bool(record.get("texts", False)),
            normalisation=Normalisation(scores["mean"], scores["std"]) if scores else None,
        )

    def require_base(self, base: Path) -> None:
        """Refuse a base other than the one that was trained. Raises ArtifactError."""
        digest = open_artifact(base).digest
        if digest != self.base_digest:
            raise ArtifactError(
                f"wrong base: {self.base_digest[:12]} was trained, {base} is {digest[:12]}",
                details=[f"trained: {self.base_digest}", f"given:   {digest}"],
                hint="give the base that was trained, or train again: force=[train]",
            )

    def copy_side_files(self, out: Path, *, config: bool) -> None:
        """Copy the tokenizer and generation config of training into `out`.

        Args:
            out: folder to write to.
            config: True to write config.json too.
        """
        copy_files(self.root / "tokenizer", out)
        source = self.root / GENERATION_CONFIG
        if not source.is_file():
            raise ArtifactError(f"{self.root}: no {GENERATION_CONFIG}")
        shutil.copyfile(source, out / GENERATION_CONFIG)
        if config:
            write_json(out / CONFIG, self.config)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON as Hugging Face does: indented, sorted keys, newline at the end."""
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def copy_files(source: Path, out: Path) -> list[str]:
    """Copy the files of a tokenizer folder, and return their names.

    Raises:
        ArtifactError: the folder has no files.
    """
    files = sorted(path for path in source.glob("*") if path.is_file())
    if not files:
        raise ArtifactError(f"{source}: no tokenizer files")
    for path in files:
        shutil.copyfile(path, out / path.name)
    return [path.name for path in files]


def measure(
    score: Score,
    model: ModelRef,
    *,
    trained: Path,
    out: Path,
    limit: DriftLimit,
    exact: bool,
    cause: str = "",
) -> tuple[Moved, Check]:
    """Take the fingerprint of `model` into `out`, and check its drift from the trained model.

    Args:
        score: takes the fingerprint.
        model: the model to load.
        trained: the `shards` artifact with training's own fingerprint.
        out: folder that gets the fingerprint, under the same file name.
        limit: limits of the drift profile.
        exact: True if the mean drift must also stay within twice the engine's own repeat noise. If
            the two were measured on different hardware or software, `limit` is widened to what
            that noise explains.
        cause: the most likely cause of a failure, and what to type.

    Returns:
        The drift and its verdict.
    """
    path = print_in(trained)
    reference = load_print(path)
    device = (reference.measured_on or {}).get("device")
    new = score(replace(model, device=device), path, out / path.name)
    drift = moved(reference, new)
    if not exact or same_arithmetic(reference, new):
        return drift, verdict(drift, limit, reference.noise if exact else None, cause=cause)
    limit = by_noise(limit, drift, reference.noise, new.noise)
    there, here = (_shown(side.measured_on) for side in (reference, new))
    name = f"drift from the trained model (trained on {there}, measured on {here})"
    # A looser profile changes nothing here, so the hint to choose one would be wrong.
    return drift, replace(verdict(drift, limit, name=name, cause=cause), hint=cause)


def _shown(measured_on: Mapping[str, str] | None) -> str:
    stack = measured_on or {}
    return ", ".join(stack[key] for key in ("name", "attention", "torch") if key in stack)


def carry_over(
    weights: Path, *, trained: Path, out: Path, limit: DriftLimit
) -> tuple[Moved, Check]:
    """Copy the fingerprint of `weights` instead of measuring `out`, which has the same bytes.

    Returns:
        The drift and its verdict.

    Raises:
        ArtifactError: `weights` has no fingerprint.
    """
    earlier = print_in(weights)
    shutil.copyfile(earlier, out / earlier.name)
    drift = moved(load_print(print_in(trained)), load_print(earlier))
    return drift, verdict(drift, limit)
