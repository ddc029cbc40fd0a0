"""Online runs: critic, resuming, faults, independence of the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import TrainingError
from tasks.rl.loop import CURSOR
from tasks.training.engine import checkpoint
from tasks.training.engine.saving import convert
from tasks.training.job import Zero
from tests.settings import Batch, Launch, Optim
from tests.training.online import SLOW, Bench, Finished, Run, finish, in_game
from tests.training.places import (
    rank_pids,
    read_json,
    require_same_weights,
    run_train,
    stitched,
)

pytestmark = pytest.mark.timeout(2400)


def losses(out: Path) -> list[float]:
    return list(read_json(out / "train.json")["losses"])


def require_same_bytes(first: Path, second: Path) -> None:
    """Compare the policies of two runs; a critic is in each advantage."""
    assert losses(first) == losses(second)
    files = sorted((first / "shards").iterdir())
    assert len(files) == 2
    for path in files:
        assert path.read_bytes() == (second / "shards" / path.name).read_bytes(), path.name


def test_the_artifact_of_the_policy_has_no_critic(finished: Finished) -> None:
    policy = read_json(finished["whole"] / "partitions.json")["parameters"]
    assert policy
    assert not [name for name in policy if "critic" in name or "value" in name]
    explained = [step["explained_variance"] for step in finished.steps["whole"]]
    assert explained[-1] != 0.0, "it has learned"


def test_a_resumed_run_ends_with_identical_weights(finished: Finished) -> None:
    whole, resumed = finished["whole"], finished["resumed"]
    assert [step["step"] for step in finished.steps["resumed"]] == [3]
    assert len(losses(whole)) == 3
    require_same_bytes(whole, resumed)


def test_an_environment_of_several_turns(finished: Finished) -> None:
    """The trainer's log-probabilities are those of sampling: it reads the same observations.

    The second iteration's responses come from the adapter of the first.
    """
    steps = finished.steps["whole"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["approx_kl"] > 1e-3  # the first step moves the policy, and vLLM's with it
    for step in steps:
        assert 2 < step["turns"] <= 4
        assert step["turns"] <= step["length"] < 26, "an observation has 26 tokens"
        assert step["reward"] == pytest.approx(step["reward/environment"])
        assert step["mismatch/max_abs"] < 1e-3
        assert 0 <= step["truncated"] < 1
        assert step["out_of_turns"] < 1
    assert read_json(finished["whole"] / "train.json")["metrics"]["heldout_reward_after"] > 0


def test_full_weights_are_synced_after_a_step(finished: Finished) -> None:
    """GRPO: with the weights before, vLLM would be as far from the trainer as the step moves it."""
    steps = finished.steps["full"]
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["approx_kl"] > 1e-3
    assert max(step["mismatch/max_abs"] for step in steps) < 1e-3


@pytest.mark.slow
def test_learning_rate_0_changes_nothing(finished_slowly: Finished) -> None:
    for name, moves in (("still", False), ("plain", True)):
        halves = [x for key, x in stitched(finished_slowly[name]).items() if "lora_B" in key]
        assert halves
        assert any(tensor.any() for tensor in halves) == moves, name
    (step,) = finished_slowly.steps["still"]  # a single step measures during its update
    assert "seconds/measure" not in step
    assert step["entropy"] > 0


@pytest.mark.slow
def test_a_separate_critic_is_not_in_the_artifact_and_resumes(finished_slowly: Finished) -> None:
    out = finished_slowly["separate_lora"]
    policy = read_json(out / "partitions.json")["parameters"]
    assert not [key for key in policy if "value_head" in key or "critic" in key]
    assert finished_slowly.steps["separate_lora"][-1]["explained_variance"] != 0.0
    for name in ("separate_lora_resumed", "separate_lora_ended"):
        require_same_bytes(out, finished_slowly[name])


@pytest.mark.slow
def test_full_fine_tuning_keeps_a_copy_as_the_reference(finished_slowly: Finished) -> None:
    outs = [finished_slowly[f"reference_zero{stage}"] for stage in (2, 3)]
    for out in outs:
        assert 0 < read_json(out / "train.json")["metrics"]["kl"] < 5, "it stays where it was"
    require_same_weights(*outs, tolerance=1e-4)


@pytest.mark.slow
def test_dapo_with_refill_resumes_at_the_next_prompt(finished_slowly: Finished) -> None:
    whole, resumed = (finished_slowly.steps[name] for name in ("dapo", "dapo_resumed"))
    assert [step["epoch"] for step in resumed] == [step["epoch"] for step in whole[2:]]
    half_way = finished_slowly.folder / "dapo" / "checkpoints" / "step-00000002"
    cursor = checkpoint.open_checkpoint(half_way).progress.kept[CURSOR]
    assert cursor == whole[1]["epoch"] * 40
    assert cursor > 2 * 8, "groups without signal were replaced"
    assert losses(finished_slowly["dapo"]) == losses(finished_slowly["dapo_resumed"])
    assert any(losses(finished_slowly["dapo"])), "not all responses are masked"


@pytest.mark.slow
def test_the_best_policy_is_saved_with_its_critic(finished_slowly: Finished) -> None:
    best, first = finished_slowly["best_of_3"], finished_slowly["best_of_1"]
    assert read_json(best / "train.json")["metrics"]["best_step"] == 1
    require_same_bytes(first, best)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_ranks(
    finished_slowly: Finished, bench: Bench
) -> None:
    """Policy and critic come from a universal checkpoint; only the order of sums differs."""
    whole, universal = finished_slowly["plain"], bench.folder / "universal"
    half_way = whole.parent / "checkpoints" / "step-00000002"
    convert(half_way, universal)
    alone = bench.job("alone", SLOW["plain"], launch=Launch(nproc=1, threads=1))
    alone = replace(alone, resume=half_way, universal=universal)
    finish(bench, {"alone": alone}, ranks=1)
    assert losses(alone.out)[:2] == losses(whole)[:2]
    assert losses(alone.out) == pytest.approx(losses(whole), rel=1e-3, abs=1e-5)
    metrics = read_json(whole / "train.json")["metrics"]
    assert metrics["heldout_reward_after"] >= metrics["heldout_reward_before"]


@pytest.mark.slow
def test_any_number_of_ranks_learns_the_same(bench: Bench) -> None:
    """Under ZeRO-3 ranks decode together, and each has its own limits and number of episodes."""
    plain = Run({"iterations": 2, "kl_coef": 0.0}, {"objective": "grpo", "save_steps": 0})
    sizes = {"kl_coef": 0.0, "rollout_batch_size": 3, "num_generations": 2}
    game = in_game(
        sizes, objective="grpo", save_steps=0, batch=Batch(2, 6, max_len=128), zero=Zero(3)
    )
    for name, run, counts in (("plain", plain, (1, 2)), ("game", game, (1, 3))):
        outs = []
        for ranks in counts:
            job = bench.job(f"{name}-{ranks}", run, launch=Launch(nproc=ranks, threads=1))
            finish(bench, {name: job}, ranks=ranks)
            outs.append(job.out)
        require_same_weights(*outs, tolerance=1e-5)
        assert losses(outs[0]) == pytest.approx(losses(outs[1]), rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "optim", "reward", "named"),
    [
        ({"mismatch_limit": 1e-12}, {}, "reward", "iteration 1"),
        ({}, {"optim": Optim(lr=1e30, scheduler="constant"), "save_steps": 1}, "reward",
         "not finite"),
        ({}, {}, "equal", "no gradient"),
    ],
)  # fmt: skip
def test_a_policy_that_went_too_far_or_nowhere_ends_the_run(
    limit: dict[str, float], optim: dict[str, Any], reward: str, named: str, bench: Bench
) -> None:
    """Without a limit of the rate the weights leave the range of fp32 in a step or two."""
    rl = {"kl_coef": 0.0, "iterations": 3, **limit}
    run = Run(rl, {"objective": "grpo", **optim}, reward=reward)
    folder = bench.folder / "run"
    with pytest.raises(TrainingError) as caught:
        run_train(folder, bench.bases["plain"], bench.data, bench.settings(run))
    assert named in caught.value.report() or "nan" in caught.value.report()
    assert rank_pids(folder) == []
    assert not list((folder / "out").rglob("*.safetensors"))
