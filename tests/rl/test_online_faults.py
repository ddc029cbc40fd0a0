"""Online runs that fail, through the stage `train`: the error names the cause."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import (
    DataError,
    PlumblineError,
    RewardError,
    StageProcessError,
    TrainingError,
)
from tasks.pipeline.report import StageReport
from tasks.train import train
from tests.rl.online import settings_with
from tests.settings import Settings

pytestmark = pytest.mark.slow
Event = dict[str, Any]
REWARDS = {
    "raises": ("raise ValueError('no judge today')", "no judge today"),
    "not a number": ("return [float('nan')] * len(completions)", "gave nan for"),
    "too few": ("return [1.0]", "gave 1 rewards for"),
    "hangs": ("import time; time.sleep(600)", "3 s"),
}


def start(
    folder: Path, base: Path, data: Path, settings: Settings, observe: Any = None
) -> StageReport:
    """Run the stage in its own folder; a second start resumes from its checkpoints."""
    out = folder / "out"
    out.mkdir(parents=True)
    return train(
        out,
        base=base,
        data=data,
        base_digest="b" * 64,
        settings=settings,
        checkpoints=folder / "checkpoints",
        log=logging.getLogger("test"),
        log_path=folder / "log",
        on_event=observe,
    )


def ranks_of(folder: Path) -> list[int]:
    """Return the processes that run the job, without torchrun and its parents."""
    mark = f"tasks.rl\0{(folder / 'checkpoints' / 'job.json').resolve()}"
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if mark in text and "torch.distributed.run" not in text:
            pids.append(int(path.parent.name))
    return sorted(pids)


def failure(
    kind: type[PlumblineError], folder: Path, base: Path, data: Path, settings: Settings
) -> PlumblineError:
    """Return the error that ends the run; all of its ranks have to end too."""
    with pytest.raises(kind) as caught:
        start(folder, base, data, settings)
    assert ranks_of(folder) == []
    return caught.value


def rewarded(settings: Settings, **reward: Any) -> Settings:
    return replace(settings, online={**settings.online, "reward": reward})


def grpo(data: Path, **rl: Any) -> Settings:
    return settings_with(data, rl={"kl_coef": 0.0, "iterations": 3, **rl}, objective="grpo")


@pytest.mark.parametrize("fault", REWARDS)
def test_a_failing_reward_function_is_named_with_the_prompt(
    fault: str, base: Path, data: Path, tmp_path: Path
) -> None:
    body, message = REWARDS[fault]
    judge = tmp_path / "judge.py"
    judge.write_text(f"def score(completions, **_):\n    {body}\n")
    settings = rewarded(grpo(data), function=f"{judge}:score", timeout_s=3.0)
    error = failure(RewardError, tmp_path / "run", base, data, settings)
    assert f"reward.function={judge}:score" in error.message
    everything = "\n".join([error.message, *error.details])
    assert message in everything
    assert "heldout" in everything, "the row that was scored first"


def test_a_reward_server_that_is_down(base: Path, data: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    settings = rewarded(grpo(data), url=url, timeout_s=2.0, retries=1)
    error = failure(RewardError, tmp_path / "run", base, data, settings)
    assert url in error.message
    assert "heldout" in "\n".join([error.message, *error.details])


def test_prompts_that_are_too_long_end_the_run_at_the_start(
    base: Path, data: Path, tmp_path: Path
) -> None:
    settings = grpo(data)
    rollout = {**settings.online["rollout"], "max_prompt_len": 10}
    short = replace(settings, online={**settings.online, "rollout": rollout})
    error = failure(DataError, tmp_path / "run", base, data, short)
    assert "40 of 40 prompts cannot be used" in error.message
    assert error.details[0].startswith("train0: ")
    assert not list((tmp_path / "run" / "out").rglob("*.safetensors"))


def test_a_policy_too_far_from_its_reference_ends_the_run(
    base: Path, data: Path, tmp_path: Path
) -> None:
    error = failure(TrainingError, tmp_path / "run", base, data, grpo(data, kl_limit=-1.0))
    assert "iteration 1: the policy is" in error.message
    assert "more than rl.kl_limit=-1" in error.message


def test_an_engine_that_differs_from_the_trainer_ends_the_run(
    base: Path, data: Path, tmp_path: Path
) -> None:
    error = failure(TrainingError, tmp_path / "run", base, data, grpo(data, mismatch_limit=1e-12))
    assert "iteration 1: trainer and engine differ by" in error.message
    assert "rollout.engine=transformers" in error.hint


def test_a_run_killed_within_an_iteration_ends_with_identical_weights(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """PPO with a checkpoint every second iteration, killed in its fourth."""
    settings = settings_with(data)
    settings = replace(settings, log_every=1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(whole, base, data, settings)
    with pytest.raises(StageProcessError):
        start(killed, base, data, settings, _at_step(3, lambda: _kill(killed)))
    (killed / "out").rename(killed / "broken")
    report = start(killed, base, data, settings)
    assert report.notes["resumed_after_step"] == 2
    files = sorted(
        path.relative_to(whole / "out") for path in (whole / "out").rglob("*.safetensors")
    )
    assert [path for path in files if path.parts[0] == "critic"]
    for path in files:
        assert (whole / "out" / path).read_bytes() == (killed / "out" / path).read_bytes(), path


def _at_step(step: int, act: Callable[[], None]) -> Callable[[Event], None]:
    def observe(event: Event) -> None:
        if event["event"] == "step" and event["step"] == step:
            act()

    return observe


def _kill(folder: Path) -> None:
    for pid in ranks_of(folder):
        os.kill(pid, signal.SIGKILL)
