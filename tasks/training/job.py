"""Settings of a training run, and where its files are.

The parent writes them as `job.json`, and every rank reads that file. `tasks/config` defines the
sections, with their types and defaults. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tasks.config.sections import (
    Batch,
    Evaluate,
    Launch,
    Loading,
    Loss,
    Optim,
    Peft,
    Resume,
    Rollout,
    Training,
    Zero,
    read_section,
)
from tasks.core.redaction import redact

__all__ = [
    "Batch", "Evaluate", "Launch", "Loss", "Optim", "Peft", "Settings", "TrainJob", "Zero",
]  # fmt: skip

REWARD_URL = "PLUMBLINE_REWARD_URL"
"""Variable of the ranks with `reward.url`: its login and tokens are in no file."""

_GROUPS: dict[str, type[Any]] = {
    "optim": Optim,
    "batch": Batch,
    "launch": Launch,
    "evaluate": Evaluate,
}
"""Groups of section `train` that have a name of their own in `Settings`."""


# Keyword-only, since fields of the bases have defaults.
@dataclass(frozen=True, kw_only=True)
class Settings(Training, Loading):
    """Everything that decides what is trained, and nothing about where it is stored.

    `online` has the sections `rl`, `rollout` and `reward` of an objective that learns from its own
    responses, see `tasks/rl/settings.py`; it is empty for all other objectives.
    """

    optim: Optim
    batch: Batch
    launch: Launch
    seed: int = 0
    online: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peft: Peft = field(default_factory=Peft)
    zero: Zero = field(default_factory=Zero)
    evaluate: Evaluate = field(default_factory=Evaluate)

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes together."""
        return self.launch.nproc * self.launch.nodes

    @property
    def reward_url(self) -> str:
        """Return `reward.url` as it is recorded; empty without one."""
        return self.online.get("reward", {}).get("url") or ""

    @property
    def runs_vllm(self) -> bool:
        """Return True if ranks hold a vLLM engine, which samples responses."""
        engine = self.online.get("rollout", {}).get("engine", Rollout.engine)
        return bool(self.online) and engine == "vllm"

    @classmethod
    def from_sections(
        cls, *, train: Mapping[str, Any], model: Mapping[str, Any], **others: Any
    ) -> Settings:
        """Read the configuration's sections; `others` are `peft`, `zero`, `seed` and `online`.

        Of `model` only the fields of `Loading` are read. The fields of `Resume` in `train` are left
        out, because they do not change the result.
        """
        resume = {f.name for f in fields(Resume)}
        flat = {name: value for name, value in train.items() if name not in resume}
        groups = {
            name: {f.name: flat.pop(f.name) for f in fields(kind) if f.name in flat}
            for name, kind in _GROUPS.items()
        }
        loading = {f.name: model[f.name] for f in fields(Loading) if f.name in model}
        return read_section(cls, {**flat, **groups, **loading, **others}, "train")


@dataclass(frozen=True)
class TrainJob:
    """One training run: settings and absolute paths."""

    settings: Settings  # what to train and how
    base: Path
    base_digest: str
    data: Path  # dataset artifact
    out: Path  # folder of the `shards` artifact
    checkpoints: Path  # folder of this run's checkpoints, from one of which it may `resume`
    resume: Path | None = None
    # the engines of that checkpoint in DeepSpeed's universal form, if the number of ranks has
    # changed
    universal: Path | None = None
    # values that a checkpoint has to agree with, by dotted name
    identity: Mapping[str, Any] = field(default_factory=dict)
    # HF folder that the rollout engine loads; None: the base itself
    rollout_base: Path | None = None
    # folder of the reward model that an earlier step of the chain trained
    reward: Path | None = None
    # PEFT folder, with a tokenizer, that training continues; None: a new adapter
    adapter: Path | None = None
    max_truncated: float = 0.2  # share of the training rows that may be cut

    @property
    def side_files(self) -> Path:
        """Folder of the tokenizer and the generation config."""
        return self.base if self.adapter is None else self.adapter

    def write(self, path: Path) -> None:
        """Write the job as JSON, without secrets (see `REWARD_URL`)."""
        document = asdict(self)
        if url := self.settings.reward_url:  # nodes look it up by this text, see `urls_of`
            document["settings"]["online"]["reward"]["url"] = redact(url)
        text = json.dumps(document, indent=1, sort_keys=True, default=str)
        path.write_text(text + "\n")

    @classmethod
    def read(cls, path: Path) -> TrainJob:
        """Read a job that `write` wrote."""
        values = json.loads(path.read_text())
        for each in fields(cls):
            if "Path" in str(each.type) and values[each.name] is not None:
                values[each.name] = Path(values[each.name])
        values["settings"] = read_section(Settings, values["settings"], "settings")
        return cls(**values)
