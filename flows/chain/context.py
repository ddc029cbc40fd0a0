"""Inputs of one step: its settings, the runner of its stages, the results of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.chain.dry_run import DryRun
from flows.chain.steps import continues
from tasks.bisect.run import Explainer
from tasks.data.kinds import Kind, kind_for, names_texts
from tasks.drift.fingerprint import PROFILES, DriftLimit, quantized_profile
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Mechanism
from tasks.process.multinode import Leader
from tasks.serving.vllm.job import VllmChild

StageRunner = Mechanism | DryRun
"""Runs stages, or only reports what would run."""


@dataclass(frozen=True)
class Delivered:
    """Results of a step, from which the next one starts: models, and section `peft` of the step.

    `adapter` is None if all weights were trained, `quantized` without `convert.quantize`.
    """

    served: Artifact
    base: Artifact
    adapter: Artifact | None
    peft: Mapping[str, Any]
    quantized: Artifact | None = None


@dataclass(frozen=True)
class ChainRun:
    """Inputs of one step.

    Attributes:
        scorer: the transformers reference.
        vllm: the vLLM process that serves the models.
        leader: asks the other nodes for their ranks; None for a run on one node.
        earlier: results of the step before; None to start from `model.path`.
        reward: the reward model that an earlier step trained.
    """

    settings: Mapping[str, Any]
    mechanism: StageRunner
    scorer: ReferenceScorer
    vllm: VllmChild = field(default_factory=VllmChild)
    leader: Leader | None = None
    earlier: Delivered | None = None
    reward: Artifact | None = None

    @property
    def rows(self) -> Kind:
        """Kind of rows that the objective trains and is evaluated on."""
        texts = names_texts(self.settings["data"])
        return kind_for(self.settings["train"]["objective"], texts=texts)

    @property
    def profile(self) -> DriftLimit:
        """Drift that the gate's profile allows between two engines."""
        return PROFILES[self.settings["gate"]["profile"]]

    @property
    def quantized_profile(self) -> DriftLimit:
        """Drift that `convert.quantize` may cause."""
        convert = self.settings["convert"]
        return quantized_profile(convert["quantize"], convert["quantize_profile"])

    @property
    def continued(self) -> Artifact | None:
        """Adapter that this step trains further; None for a new one."""
        if self.earlier is None or not continues(self.earlier.peft, self.settings["peft"]):
            return None
        return self.earlier.adapter

    @property
    def explain(self) -> Explainer:
        """Say where the models part after a failed drift check."""
        return Explainer(self.mechanism.logs, self.settings["smoke"]["threads"])

    def log_path(self, stage: str) -> Path:
        """Return the log file of a stage's child processes."""
        return self.mechanism.logs / f"{stage}.log"
