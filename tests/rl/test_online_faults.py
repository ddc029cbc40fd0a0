"""Online runs that fail, through the stage `train`: the error names the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.core.errors import (
    DataError,
    PlumblineError,
    RewardError,
    TrainingError,
)
from tests.rl.online import Bench, Run
from tests.settings import Optim, Settings
from tests.training.places import rank_pids, run_train

pytestmark = pytest.mark.slow
ONLINE = "tasks.rl"
GRPO = Run({"kl_coef": 0.0, "iterations": 3}, {"objective": "grpo"})
JUDGES = {
    "raises": ("raise ValueError('no judge today')", "no judge today"),
    "not a number": ("return [float('nan')] * len(completions)", "nan"),
    "too few": ("return [1.0]", "gave 1 rewards"),
    "hangs": ("import time; time.sleep(600)", "3 s"),
}


def failure(kind: type[PlumblineError], bench: Bench, settings: Settings) -> PlumblineError:
    """Return the error that ends the run; all of its ranks have to end too."""
    folder = bench.folder / "run"
    with pytest.raises(kind) as caught:
        run_train(folder, bench.bases["base"], bench.data, settings)
    assert rank_pids(folder, ONLINE) == []
    return caught.value


def with_section(settings: Settings, section: str, **values: Any) -> Settings:
    return replace(settings, online={**settings.online, section: values})


@pytest.mark.parametrize("fault", JUDGES)
def test_a_failing_reward_function_is_named_with_the_prompt(fault: str, bench: Bench) -> None:
    body, message = JUDGES[fault]
    judge = bench.folder / "judge.py"
    judge.write_text(f"def score(completions, **_):\n    {body}\n")
    reward = {"function": f"{judge}:score", "timeout_s": 3.0}
    error = failure(RewardError, bench, with_section(bench.settings(GRPO), "reward", **reward))
    assert f"reward.function={judge}:score" in error.message
    assert message in error.report()
    assert "heldout" in error.report(), "the row that was scored first"


def test_a_reward_server_that_is_down(bench: Bench) -> None:
    reward = {"url": "http://127.0.0.1:9/score", "timeout_s": 2.0, "retries": 1}
    error = failure(RewardError, bench, with_section(bench.settings(GRPO), "reward", **reward))
    assert reward["url"] in error.message
    assert "heldout" in error.report()


def test_prompts_that_are_too_long_end_the_run_at_the_start(bench: Bench) -> None:
    run = replace(GRPO, rollout={"max_prompt_len": 10})
    error = failure(DataError, bench, bench.settings(run))
    assert "40 of 40" in error.message
    assert error.details[0].startswith("train0: ")
    assert not list((bench.folder / "run" / "out").rglob("*.safetensors"))


def test_a_loss_that_is_not_finite_names_the_last_checkpoint(bench: Bench) -> None:
    """Without a limit the weights leave the range of fp32 in a step or two."""
    optim = Optim(lr=1e30, scheduler="constant")
    error = failure(TrainingError, bench, bench.settings(GRPO, optim=optim, save_steps=1))
    assert "not finite" in error.message or "nan" in error.message
    assert not list((bench.folder / "run" / "out").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("limit", "named"), [({"kl_limit": -1.0}, "kl_limit"), ({"mismatch_limit": 1e-12}, "differ by")]
)
def test_a_policy_that_went_too_far_ends_the_run(
    limit: dict[str, float], named: str, bench: Bench
) -> None:
    error = failure(TrainingError, bench, bench.settings(replace(GRPO, rl={**GRPO.rl, **limit})))
    assert "iteration 1" in error.message
    assert named in error.message
