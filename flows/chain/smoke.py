"""The stage `smoke_eval` within the chain: what is asked of the served model, and beside whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.chain.context import ChainRun
from flows.chain.stages import SMOKE
from tasks.data.kinds import PROMPTS, TEXTS
from tasks.evaluation.smoke import SmokeSettings
from tasks.evaluation.smoke_rewards import smoke_rewards
from tasks.evaluation.smoke_texts import smoke_texts
from tasks.pipeline.artifact import Artifact
from tasks.rl.rewards.identity import model_digest
from tasks.smoke_eval import smoke_eval


def smoke_stage(run: ChainRun, **inputs: Artifact) -> None:
    """Load what is served and hold it against what came before it."""
    settings = dict(run.settings["smoke"])
    engine = settings.pop("engine")
    log_path = run.log_path("smoke_eval")
    drawing: dict[str, float] = {}
    context: dict[str, Any] = {"scorer": run.scorer, "log_path": log_path}
    if run.settings["train"]["objective"] == "reward":
        function: Any = smoke_rewards
        del inputs["base"]  # it has no head to compare with
    else:
        function = smoke_texts if run.rows is TEXTS else smoke_eval
        if run.rows is PROMPTS:
            drawing["temperature"] = run.settings["rollout"]["temperature"]
            if (reward := _reward_model(run)) is not None:
                inputs["reward"] = reward
        history = {r.name: r.drift for r in run.mechanism.results if r.drift is not None}
        context["history"] = history
    settled = {"settings": SmokeSettings(**settings), "profile": run.profile}
    config = {"engine": engine, **settled, **drawing}
    run.mechanism.run(SMOKE, function, inputs=inputs, config=config, context=context)


def _reward_model(run: ChainRun) -> Artifact | None:
    """Who scores the replies: the link before, or a folder of the user's."""
    if run.reward is not None:
        return run.reward
    if (named := run.settings["reward"]["model"]) is None:
        return None
    return Artifact("served", Path(named).expanduser(), model_digest(Path(named)))
