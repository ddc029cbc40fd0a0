"""What one chain's run is given, and what follows from its settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain.steps import continues
from tasks.data.kinds import Kind, kind_for, names_texts
from tasks.drift.fingerprint import PROFILES, DriftLimit
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Mechanism
from tasks.process.multinode import Leader


@dataclass(frozen=True)
class Delivered:
    """Results of a chain that the next one begins with.

    Attributes:
        served: what is served.
        base: what it was trained from.
        adapter: on that base; None where all weights were trained.
        peft: its section `peft`.
    """

    served: Artifact
    base: Artifact
    adapter: Artifact | None
    peft: Mapping[str, Any]


@dataclass(frozen=True)
class ChainRun:
    """One chain's run: settings, the mechanism, and who measures.

    Attributes:
        settings: the resolved configuration as plain nested dictionaries.
        mechanism: runs the stages.
        scorer: the transformers reference.
        leader: of the other nodes, where there are any.
        earlier: the model that came before it in a chain of chains; None: that of the settings.
        reward: the reward model that came before it, likewise.
    """

    settings: Mapping[str, Any]
    mechanism: Mechanism
    scorer: ReferenceScorer
    leader: Leader | None = None
    earlier: Delivered | None = None
    reward: Artifact | None = None

    @property
    def rows(self) -> Kind:
        """What is learnt from, and tested on."""
        texts = names_texts(self.settings["data"])
        return kind_for(self.settings["train"]["objective"], texts=texts)

    @property
    def profile(self) -> DriftLimit:
        """What two engines may differ by."""
        return PROFILES[self.settings["gate"]["profile"]]

    @property
    def continued(self) -> Artifact | None:
        """Return the adapter that this chain trains further; None for a new one."""
        if self.earlier is None or not continues(self.earlier.peft, self.settings["peft"]):
            return None
        return self.earlier.adapter

    def log_path(self, stage: str) -> Path:
        """The file that a stage's children write to."""
        return self.mechanism.logs / f"{stage}.log"
