"""Whole online runs on two ranks: what they leave, that they go on, that ranks do not count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.training.job import Launch, Optim
from tests.rl.online import job_of, run, settings_with, stitched


@pytest.fixture(scope="module")
def ppo(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A PPO run, one that goes on from its second iteration, and one with learning rate 0."""
    folder = tmp_path_factory.mktemp("ppo")
    usual = settings_with(data)
    whole = job_of(usual, base, data, folder / "whole")
    half_way = whole.checkpoints / "step-00000002"
    resumed = job_of(usual, base, data, folder / "resumed", resume=half_way)
    still = settings_with(data, rl={"iterations": 2}, optim=Optim(lr=0.0, scheduler="constant"))
    run(folder, [whole, resumed, job_of(still, base, data, folder / "still")])
    return {name: folder / name for name in ("whole", "resumed", "still")}


def test_the_policy_leaves_without_its_critic(ppo: dict[str, Path]) -> None:
    described = json.loads((ppo["whole"] / "partitions.json").read_text())
    assert described["parameters"]
    assert not [name for name in described["parameters"] if "critic" in name or "value" in name]
    critic = json.loads((ppo["whole"] / "critic" / "partitions.json").read_text())["parameters"]
    assert critic["value_head.weight"]["shape"] == [1, 64]
    assert [name for name in critic if ".critic." in name]
    assert not [name for name in critic if ".default." in name]


def test_a_run_that_goes_on_gives_the_same_bytes(ppo: dict[str, Path]) -> None:
    left = [json.loads((ppo[name] / "train.json").read_text()) for name in ("whole", "resumed")]
    assert left[0]["losses"] == left[1]["losses"]
    assert len(left[0]["losses"]) == 4
    files = sorted(path.relative_to(ppo["whole"]) for path in ppo["whole"].rglob("rank-*"))
    files = [path for path in files if path.parts[0] in ("shards", "critic")]
    assert len(files) == 4
    for path in files:
        assert (ppo["whole"] / path).read_bytes() == (ppo["resumed"] / path).read_bytes(), path


def test_without_a_learning_rate_nothing_moves(ppo: dict[str, Path]) -> None:
    after = stitched(ppo["still"])
    assert after
    assert all(not tensor.any() for name, tensor in after.items() if "lora_B" in name)
    trained = stitched(ppo["whole"])
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)


def test_the_reward_rises(ppo: dict[str, Path]) -> None:
    metrics = json.loads((ppo["whole"] / "train.json").read_text())["metrics"]
    assert metrics["steps"] == 4
    assert metrics["heldout_reward_after"] >= metrics["heldout_reward_before"]


@pytest.mark.slow
def test_one_rank_and_two_learn_the_same(base: Path, data: Path, tmp_path: Path) -> None:
    rl = {"iterations": 2, "kl_coef": 0.0}
    for ranks in (1, 2):
        settings = settings_with(
            data, rl=rl, objective="grpo", launch=Launch(nproc=ranks, threads=1), save_steps=0
        )
        run(tmp_path, [job_of(settings, base, data, tmp_path / str(ranks))], ranks=ranks)
    one, two = (stitched(tmp_path / str(ranks)) for ranks in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-5)
    losses = [json.loads((tmp_path / r / "train.json").read_text())["losses"] for r in "12"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
