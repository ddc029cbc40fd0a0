"""Run the stage `smoke_eval` of a chain: choose its function, its inputs and its settings."""

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
    """Load the served model and compare it with the trained one and with the model before.

    Args:
        run: the step.
        inputs: artifacts `served`, `base` (the model before training), `data` and `trained`.
    """
    settings = dict(run.settings["smoke"])
    engine = settings.pop("engine")
    log_path = run.log_path("smoke_eval")
    sampling: dict[str, float] = {}
    context: dict[str, Any] = {"scorer": run.scorer, "log_path": log_path}
    if run.settings["train"]["objective"] == "reward":
        function: Any = smoke_rewards
        del inputs["base"]  # it has no reward head to compare with
    else:
        function = smoke_texts if run.rows is TEXTS else smoke_eval
        if run.rows is PROMPTS:
            sampling["temperature"] = run.settings["rollout"]["temperature"]
            if (reward := _reward_model(run)) is not None:
                inputs["reward"] = reward
        history = {r.name: r.drift for r in run.mechanism.results if r.drift is not None}
        context["history"] = history
    limits = {"settings": SmokeSettings(**settings), "profile": run.profile}
    config = {"engine": engine, **limits, **sampling}
    run.mechanism.run(SMOKE, function, inputs=inputs, config=config, context=context)


def _reward_model(run: ChainRun) -> Artifact | None:
    """Return the reward model: that of an earlier step, or the folder of `reward.model`."""
    if run.reward is not None:
        return run.reward
    if (folder := run.settings["reward"]["model"]) is None:
        return None
    return Artifact("served", Path(folder).expanduser(), model_digest(Path(folder)))
