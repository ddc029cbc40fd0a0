"""What gather, merge and convert share: the trained side's files, and the drift measurement."""

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
    """What training said of itself: `train.json` and `config.json` of its artifact.

    Attributes:
        root: the `shards` artifact.
        quantization: how the base was quantised in training; None when it was not.
        base_digest: digest of the base artifact that was trained.
        dtype: torch name of the dtype in which training held the model.
        config: the trained side's model configuration, quantisation left out.
        attn_implementation: that training ran, transformers' name; another one rounds otherwise.
        objective: what was trained for.
        texts: whether it was trained on raw texts, which takes no chat template.
        normalisation: mean and std of a reward model's scores; None where there are none.
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
        """Whether a reward model was trained: a score head in place of the language model's."""
        return self.objective == "reward"

    @classmethod
    def read(cls, root: Path) -> Trained:
        """Read from a `shards` artifact. Raises ArtifactError."""
        said, config = read_json(root / "train.json"), read_json(root / CONFIG)
        missing = {"quantization", "base_digest"} - set(said)
        if missing:
            raise ArtifactError(f"{root}/train.json lacks {', '.join(sorted(missing))}")
        dtype = config.get("dtype", config.get("torch_dtype"))
        if dtype is None:
            raise ArtifactError(f"{root}/{CONFIG} does not say the model's dtype")
        config.pop("quantization_config", None)  # of training; what is handed on is not quantised
        scores = said.get("scores")
        return cls(
            root,
            said["quantization"],
            said["base_digest"],
            str(dtype),
            config,
            attn_implementation=str(said.get("attn_implementation", "sdpa")),
            objective=str(said.get("objective", "sft")),
            texts=bool(said.get("texts", False)),
            normalisation=Normalisation(scores["mean"], scores["std"]) if scores else None,
        )

    def require_base(self, base: Path) -> None:
        """Refuse a base other than the one that was trained. Raises ArtifactError."""
        found = open_artifact(base).digest
        if found != self.base_digest:
            raise ArtifactError(
                f"wrong base: {self.base_digest[:12]} was trained, {base} is {found[:12]}",
                details=[f"trained: {self.base_digest}", f"given:   {found}"],
                hint="give the base that was trained, or train again: force=[train]",
            )

    def copy_side_files(self, out: Path, *, config: bool) -> None:
        """Put the trained side's tokenizer and generation config, and config.json, into `out`."""
        copy_files(self.root / "tokenizer", out)
        source = self.root / GENERATION_CONFIG
        if not source.is_file():
            raise ArtifactError(f"{self.root}: no {GENERATION_CONFIG}")
        shutil.copyfile(source, out / GENERATION_CONFIG)
        if config:
            write_json(out / CONFIG, self.config)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write as Hugging Face does: indented, sorted keys, newline at the end."""
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def copy_files(source: Path, out: Path) -> list[str]:
    """Copy the plain files of a tokenizer folder. Raises ArtifactError when there is none."""
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
    """Take the print of `model` into `out` and judge its distance from the trained one.

    Args:
        score: who measures.
        model: what to load.
        trained: the `shards` artifact with training's own print.
        out: directory that gets the print, under the same name.
        limit: what the profile admits.
        exact: the mean must also stay within twice the engine's own repeat noise. Where the two are
            measured by different arithmetic, `limit` is widened to what that noise explains.
        cause: the likeliest cause of a failure and what to type.
    """
    path = print_in(trained)
    reference = load_print(path)
    device = (reference.measured_on or {}).get("device")
    new = score(replace(model, device=device), path, out / path.name)
    drift = moved(reference, new)
    if not exact or same_arithmetic(reference, new):
        return drift, verdict(drift, limit, reference.noise if exact else None, cause=cause)
    limit = by_noise(limit, drift, reference.noise, new.noise)
    there, here = (_shown(one.measured_on) for one in (reference, new))
    name = f"drift from the trained model (trained on {there}, measured on {here})"
    # No profile gates this: the hint that one would admit it is not for here.
    return drift, replace(verdict(drift, limit, name=name, cause=cause), hint=cause)


def _shown(measured_on: Mapping[str, str] | None) -> str:
    told = measured_on or {}
    return ", ".join(told[key] for key in ("name", "attention", "torch") if key in told)


def carry_over(
    weights: Path, *, trained: Path, out: Path, limit: DriftLimit
) -> tuple[Moved, Check]:
    """The drift of weights that are `out`'s, byte for byte: copied, not measured again.

    Raises:
        ArtifactError: there is none to copy.
    """
    earlier = print_in(weights)
    shutil.copyfile(earlier, out / earlier.name)
    found = moved(load_print(print_in(trained)), load_print(earlier))
    return found, verdict(found, limit)
