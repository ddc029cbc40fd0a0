"""Experiments of online learning, run by their literal commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tasks.pipeline.artifact import open_artifact, verify
from tests.e2e.conftest import Run, children, client, curve

pytestmark = pytest.mark.slow
SMALL = ("rl.iterations=3", "rl.eval_prompts=16", "smoke.eval_samples=40")
EXPERIMENTS = ("grpo_qlora", "ppo_lora_zero3", "ppo_full")
STAGES = ["prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"]
OF_CRITICS = ("critic", "value_head", "v_head")


def stages_of(experiment: str) -> list[str]:
    """Return the stages: QLoRA needs the dequantised base, full training has nothing to merge."""
    names = [name for name in STAGES if experiment != "ppo_full" or name != "merge"]
    if "qlora" in experiment:
        names.insert(names.index("train"), "rollout_base")
    return names


def keys_of(folder: Path) -> list[str]:
    """Return the names of all tensors in a folder."""
    keys: list[str] = []
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys += file.keys()
    assert keys, folder
    return keys


def require_delivered(done: Run, experiment: str) -> None:
    """Assert that every artifact is intact, nothing drifted, and no critic is served."""
    assert done.code == 0, done.output
    assert [s["name"] for s in done.summary["stages"]] == [*stages_of(experiment), "register"]
    for stage in done.summary["stages"][:-1]:
        assert verify(open_artifact(Path(stage["artifact"]))) == []
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    for name in ("gather", "convert"):
        keys = keys_of(Path(done.stage(name)["artifact"]))
        assert [key for key in keys if any(part in key for part in OF_CRITICS)] == []


def require_tracked(done: Run, iterations: int) -> None:
    """Assert that MLflow has the metrics and samples of training."""
    runs = children(done)
    assert {child.info.status for child in runs.values()} == {"FINISHED"}
    train = runs["train"].info.run_id
    assert len(curve(done, "train/reward")) == iterations
    assert max(curve(done, "train/mismatch/mean_abs")) <= 0.01
    files = {file.path for file in client(done).list_artifacts(train)}
    assert "samples.json" in files
    table: dict[str, Any] = json.loads(
        Path(client(done).download_artifacts(train, "samples.json")).read_text()
    )
    assert {"step", "id", "prompt", "response", "reward"} <= set(table["columns"])
    assert table["data"]


def require_rewards(done: Run) -> None:
    """The rewards of the summary are shares of exact matches, and those that training logged."""
    scores = done.summary["eval"]
    logged = curve(done, "eval/reward")
    assert [scores["reward_before"], scores["reward_after"]] == [logged[0], logged[-1]]
    assert all(0 <= 16 * reward == round(16 * reward) <= 16 for reward in logged)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_by_its_literal_command(
    experiment: str, rlhf: Callable[..., Run], runs: Path
) -> None:
    done = rlhf(runs, f"+exp={experiment}", *SMALL)
    require_delivered(done, experiment)
    require_tracked(done, 3)
    require_rewards(done)


def test_a_reward_function_that_raises_ends_the_command(
    rlhf: Callable[..., Run], runs: Path, tmp_path: Path
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def score(completions, **_):\n    raise ValueError('no judge today')\n")
    done = rlhf(runs, "+exp=grpo", f"reward.function={judge}:score", *SMALL)
    assert done.code == 1
    assert "no judge today" in done.output
    assert "prompt: " in done.output
    assert "Traceback" not in done.output.split("no judge today", maxsplit=1)[0]


def test_prompts_without_answers_are_learned_from_and_served(
    rlhf: Callable[..., Run], runs: Path, tmp_path: Path
) -> None:
    """A CSV file of prompts, and a reward function that reads the responses."""
    rows = "".join(f"copy {word},{len(word)}\n" for word in _words(600))
    (tmp_path / "prompts.csv").write_text("prompt,size\n" + rows)
    (tmp_path / "judge.py").write_text(
        "def score(completions, size, **_):\n"
        "    return [-abs(len(c[0]['content']) - int(s)) for c, s in zip(completions, size)]\n"
    )
    done = rlhf(
        runs, "+exp=grpo", "data=csv", f"data.path={tmp_path}/prompts.csv",
        f"reward.function={tmp_path}/judge.py:score", *SMALL,
    )  # fmt: skip
    require_delivered(done, "grpo")
    assert done.summary["eval"]["before"] is None
    assert done.summary["eval"]["after"] is None
    assert "exact match" not in done.output


def _words(count: int) -> list[str]:
    return [format(number, "05b").translate({48: "a", 49: "b"}) * 2 for number in range(count)]
