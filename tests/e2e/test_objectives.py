"""Every objective's experiment by its literal command, on the embedded default: what holds of each.

One command after the other in the main job's folder, whose base they share. About a minute each on
a quiet machine, so they run in `make test-all`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.drift.fingerprint import PROFILES
from tasks.pipeline.artifact import open_artifact, verify
from tests.e2e.conftest import Run, children, curve

pytestmark = pytest.mark.slow
STAGES = {
    "prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval",
}  # fmt: skip
REWARD = ("reward", "reward_lora_zero3")
PAIRS = ("dpo", "dpo_lora_zero3", "orpo", "simpo")
SMALL = ("train.max_steps=40", "smoke.eval_samples=60")  # of 70 steps and 300 rows


@pytest.fixture(scope="module", params=[*REWARD, *PAIRS, "kto"])
def done(request: pytest.FixtureRequest, rlhf: Callable[..., Run], runs: Path) -> Run:
    return rlhf(runs, f"+exp={request.param}", *SMALL)


def is_reward(run: Run) -> bool:
    return run.summary["exp"] in REWARD


def test_every_stage_is_there_and_intact(done: Run) -> None:
    assert done.code == 0, done.output
    assert done.summary["status"] == "completed"
    names = [stage["name"] for stage in done.summary["stages"]]
    assert set(names) == {*STAGES, "register"}
    for stage in done.summary["stages"][:-1]:
        assert verify(open_artifact(Path(stage["artifact"]))) == []
    tracked = children(done)
    assert set(tracked) == STAGES
    assert {child.info.status for child in tracked.values()} == {"FINISHED"}


def test_what_was_gathered_is_what_was_trained_to_the_last_bit(done: Run) -> None:
    gathered = done.stage("gather")["drift"]
    measured = "max_difference" if is_reward(done) else "mean_kl"
    assert gathered[measured] == 0.0
    logged = children(done)["gather"].data.metrics
    assert logged[f"drift/{measured}"] == 0.0


def test_vllm_served_what_was_trained(done: Run) -> None:
    artifact = open_artifact(Path(done.stage("smoke_eval")["artifact"]))
    assert artifact.notes["engine"] == "vllm"
    checks = json.loads((artifact.path / "report.json").read_text())["checks"]
    assert checks
    assert all(check["ok"] for check in checks)
    drift, limit = done.stage("smoke_eval")["drift"], PROFILES["standard"]
    if is_reward(done):
        assert drift["same_order"] > 0.9
    else:
        assert drift["mean_kl"] <= limit.mean_kl


def test_the_loss_falls(done: Run) -> None:
    losses = curve(done, "train/loss")
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5])
    before, after = (done.summary["eval"][f"loss_{when}"] for when in ("before", "after"))
    assert after < before


def test_the_preferred_answers_win(done: Run) -> None:
    """Held-out pairs in the right order; of KTO, the distance between the two kinds' rewards."""
    if done.summary["exp"] == "kto":
        good, bad = (curve(done, f"eval/reward_{kind}") for kind in ("desirable", "undesirable"))
        before, after = (a - b for a, b in zip(good, bad, strict=True))
    else:
        before, after = curve(done, "eval/accuracy")
    assert after > before
