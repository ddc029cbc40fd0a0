"""Other kinds of online runs in one launch: separate critics, references, no signal at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.training.job import Peft, TrainJob, Zero
from tests.rl.online import job_of, run, settings_with, stitched
from tests.settings import Optim

pytestmark = pytest.mark.slow
GENTLE = Optim(lr=1e-3, scheduler="constant")
SEPARATE = {"critic": "separate", "iterations": 3}
CRITICS = ("lora-zero3", "full-zero2")


@pytest.fixture(scope="module")
def left(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of each run, by name."""
    folder = tmp_path_factory.mktemp("variants")
    silent = folder / "silent"
    silent.mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (silent / name).symlink_to(data / name)
    (silent / "reward.py").write_text(
        "def score(completions, **_):\n    return [1] * len(completions)\n"
    )
    lora3 = settings_with(data, rl=SEPARATE, zero=Zero(stage=3))
    full2 = settings_with(data, rl=SEPARATE, peft=Peft(), optim=GENTLE)
    full3 = settings_with(
        data, rl={"iterations": 2}, objective="grpo", peft=Peft(), zero=Zero(stage=3), optim=GENTLE
    )
    still = settings_with(silent, rl={"iterations": 2, "kl_coef": 0.0}, objective="grpo")
    jobs: dict[str, TrainJob] = {}
    for name, settings in (("lora-zero3", lora3), ("full-zero2", full2)):
        whole = job_of(settings, base, data, folder / name)
        half_way = whole.checkpoints / "step-00000002"
        jobs[name] = whole
        jobs[f"{name}-resumed"] = job_of(
            settings, base, data, folder / f"{name}-resumed", resume=half_way
        )
    jobs["reference-zero3"] = job_of(full3, base, data, folder / "reference-zero3")
    reference2 = replace(full3, zero=Zero(stage=2))
    jobs["reference-zero2"] = job_of(reference2, base, data, folder / "reference-zero2")
    jobs["still"] = job_of(still, base, silent, folder / "still")
    run(folder, list(jobs.values()))
    return {name: folder / name for name in jobs}


def train_json(out: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((out / "train.json").read_text())
    return content


@pytest.mark.parametrize("name", CRITICS)
def test_a_separate_critic_is_written_beside_the_policy(name: str, left: dict[str, Path]) -> None:
    policy = json.loads((left[name] / "partitions.json").read_text())["parameters"]
    assert not [key for key in policy if "value_head" in key or "critic" in key]
    folder = left[name] / "critic"
    about = json.loads((folder / "critic.json").read_text())
    assert about["kind"] == "separate"
    critic = stitched(folder)
    assert critic["value_head.weight"].any(), "it has learned"
    assert all(torch.isfinite(tensor).all() for tensor in critic.values())
    trunk = [key for key in critic if "value_head" not in key]
    assert trunk
    assert all(("lora_" in key) == (name == "lora-zero3") for key in trunk)


@pytest.mark.parametrize("name", CRITICS)
def test_a_resumed_run_with_a_separate_critic_ends_with_identical_weights(
    name: str, left: dict[str, Path]
) -> None:
    whole, resumed = left[name], left[f"{name}-resumed"]
    assert train_json(whole)["losses"] == train_json(resumed)["losses"]
    files = sorted(
        path.relative_to(whole)
        for part in ("shards", "critic/shards")
        for path in (whole / part).iterdir()
    )
    assert len(files) == 4
    for path in files:
        assert (whole / path).read_bytes() == (resumed / path).read_bytes(), path


@pytest.mark.parametrize("stage", [2, 3])
def test_full_fine_tuning_keeps_a_copy_as_the_reference(
    stage: int, left: dict[str, Path], base: Path
) -> None:
    metrics = train_json(left[f"reference-zero{stage}"])["metrics"]
    assert isinstance(metrics, dict)
    assert 0 < metrics["kl"] < 5, "the copy stays where the policy was"


def test_a_partitioned_reference_gives_the_same_values(left: dict[str, Path]) -> None:
    two, three = (stitched(left[f"reference-zero{stage}"]) for stage in (2, 3))
    assert two.keys() == three.keys()
    for name, tensor in two.items():
        torch.testing.assert_close(tensor, three[name], rtol=0, atol=1e-4)


def test_equal_rewards_change_nothing(left: dict[str, Path]) -> None:
    tensors = stitched(left["still"])
    assert all(not tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert train_json(left["still"])["losses"] == [0.0, 0.0]
