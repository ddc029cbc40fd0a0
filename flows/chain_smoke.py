"""The stage `smoke_eval` within the chain: what is asked of the served model, and beside whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain_stages import SMOKE
from tasks.artifact import Artifact
from tasks.data.kinds import PROMPTS, TEXTS, Kind
from tasks.fingerprint import DriftLimit
from tasks.rl.rewards.identity import model_digest
from tasks.scoring import ReferenceScorer
from tasks.smoke_eval import SmokeSettings, smoke_eval
from tasks.smoke_rewards import smoke_rewards
from tasks.smoke_texts import smoke_texts
from tasks.stage import Mechanism


@dataclass(frozen=True)
class Smoke:
    """Runs the stage.

    Attributes:
        settings: the resolved configuration as plain nested dictionaries.
        mechanism: runs the stages.
        scorer: the transformers reference.
        rows: what was learnt from, and is tested on.
        profile: what two engines may differ by.
        reward: the reward model that came before in a chain of chains.
    """

    settings: Mapping[str, Any]
    mechanism: Mechanism
    scorer: ReferenceScorer
    rows: Kind
    profile: DriftLimit
    reward: Artifact | None

    def run(self, **inputs: Artifact) -> None:
        """Load what is served and hold it against what came before it."""
        settings = dict(self.settings["smoke"])
        engine = settings.pop("engine")
        log_path = self.mechanism.logs / "smoke_eval.log"
        drawing: dict[str, float] = {}
        context: dict[str, Any] = {"scorer": self.scorer, "log_path": log_path}
        if self.settings["train"]["objective"] == "reward":
            function: Any = smoke_rewards
            del inputs["base"]  # it has no head to compare with
        else:
            function = smoke_texts if self.rows is TEXTS else smoke_eval
            if self.rows is PROMPTS:
                drawing["temperature"] = self.settings["rollout"]["temperature"]
                if (reward := self._reward_model()) is not None:
                    inputs["reward"] = reward
            history = {r.name: r.drift for r in self.mechanism.results if r.drift is not None}
            context["history"] = history
        settled = {"settings": SmokeSettings(**settings), "profile": self.profile}
        config = {"engine": engine, **settled, **drawing}
        self.mechanism.run(SMOKE, function, inputs=inputs, config=config, context=context)

    def _reward_model(self) -> Artifact | None:
        """Who scores the replies: the link before, or a folder of the user's."""
        if self.reward is not None:
            return self.reward
        if (named := self.settings["reward"]["model"]) is None:
            return None
        return Artifact("served", Path(named).expanduser(), model_digest(Path(named)))
