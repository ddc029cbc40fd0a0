"""Read what `plumbline-witness` recorded in a checkpoint: facts and a print of the live model.

The record was made by the trainer's own process, from the layers themselves. It says how the base
was held, which no file of an adapter tells, and what the trained model computed: the checkpoint's
files can be compared with that, whatever trainer wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.drift.verdict import print_in
from tasks.weights.files.documents import read_json
from tasks.witness.plumbline_witness.prints import FOLDER, FORMAT

ALTERED = (
    "the files of this checkpoint are not the model that was measured when they were saved: "
    "deliver an earlier checkpoint; without its folder plumbline.witness it is not compared"
)


@dataclass(frozen=True)
class Witness:
    """Record of one checkpoint."""

    folder: Path
    facts: Mapping[str, Any]  # `witness.json`
    measured: Path  # file with the log-probabilities, or with a reward model's scores

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """Storage of the base's layers, as `{"method": "nf4", ...}`; None without adapter."""
        return self.facts["quantization"] if self.facts.get("peft") else None

    def line(self) -> str:
        """Return one line for a plan."""
        facts = self.facts
        trainers = ("trl", "llamafactory", "ms-swift", "axolotl", "unsloth", "openrlhf", "verl")
        versions = facts.get("versions", {})
        trainer = next((f"{name} {versions[name]}" for name in trainers if name in versions), "")
        by = trainer or f"transformers {versions.get('transformers', '?')}"
        step = f"step {facts['step']}, " if "step" in facts else ""
        return f"{step}{by}, {len(facts['probes'])} probes"


def part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a mapping in a record; empty if there is none."""
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def active_adapter(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the PEFT configuration of the recorded adapter that is active; empty without one."""
    adapters, active = part(part(facts, "peft"), "adapters"), part(facts, "peft").get("active")
    names = [name for name in active if name in adapters] if isinstance(active, list) else []
    return part(adapters, names[0] if names else next(iter(adapters), ""))


def find_witness(root: Path) -> Witness | None:
    """Return the record in a checkpoint's folder; None if it has none.

    Raises ArtifactError if it is incomplete, or of a newer format.
    """
    folder = root / FOLDER
    if not (folder / "witness.json").is_file():
        return None
    facts = read_json(folder / "witness.json")
    written = facts.get("format")
    if not isinstance(written, int) or written > FORMAT:
        raise ArtifactError(
            f"{folder}: a record of format {written}; this Plumbline reads up to {FORMAT}",
            hint="a newer Plumbline, or remove the folder",
        )
    if missing := [key for key in ("quantization", "probes") if key not in facts]:
        what = f"{folder}: incomplete, it lacks {', '.join(missing)}"
        raise ArtifactError(what, hint="remove the folder")
    if not isinstance(facts.get("versions", {}), dict):
        raise ArtifactError(f"{folder}: its versions are no table", hint="remove the folder")
    try:
        return Witness(folder, facts, print_in(folder))
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=error.hint or "remove the folder") from None
