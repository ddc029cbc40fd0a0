"""Whole online runs on two ranks: artifacts, resuming, independence of the number of ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import StageProcessError
from tasks.drift.fingerprint import Fingerprint
from tasks.drift.verdict import FINGERPRINT
from tasks.rl.loop import CURSOR, MISMATCH
from tasks.training.engine import checkpoint
from tasks.training.engine.universal import convert
from tasks.training.job import Evaluate, Peft, Zero
from tests.rl.killed_program import POINTS
from tests.rl.online import (
    SETTINGS,
    job_of,
    run,
    run_to,
    settings_in_game,
    settings_with,
    stitched,
)
from tests.settings import Batch, Launch, Optim

FALLING = """
calls = 0

def score(completions, **_):
    global calls
    calls += 1
    return [-calls] * len(completions)
"""


@dataclass(frozen=True)
class Online:
    """Runs of one launch: their folders by name, and the metrics of all iterations in order."""

    folder: Path
    steps: list[dict[str, Any]]

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def ppo(base: Path, chatty: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Online:
    """A PPO run, one that resumes from its second iteration, one with learning rate 0, and GRPO.

    One with an environment is between them.
    """
    folder = tmp_path_factory.mktemp("ppo")
    usual = settings_with(data)
    whole = job_of(usual, base, data, folder / "whole", async_save=True)
    half_way = whole.checkpoints / "step-00000002"
    resumed = job_of(usual, base, data, folder / "resumed", resume=half_way)
    still = settings_with(data, rl={"iterations": 2}, optim=Optim(lr=0.0, scheduler="constant"))
    jobs = [whole, resumed, job_of(still, base, data, folder / "still")]
    jobs.append(job_of(settings_in_game(data), chatty, data, folder / "game"))
    batch = Batch(micro_batch_size=4, global_batch_size=16, max_len=64)
    dropout = Peft(kind="lora", rank=4, alpha=8, dropout=0.1)
    for name, weight, peft in (
        ("apart", 1e-12, SETTINGS.peft), ("on the way", 0.0, SETTINGS.peft), ("drop", 0.0, dropout),
    ):  # fmt: skip
        rl = {"iterations": 3, "ppo_epochs": 1, "kl_coef": weight, "correction": "sequence_mask"}
        changed = {"objective": "grpo", "batch": batch, "peft": peft, "save_steps": 0}
        jobs.append(job_of(settings_with(data, rl=rl, **changed), base, data, folder / name))
    return Online(folder, run(folder, jobs))


def test_the_artifact_of_the_policy_has_no_critic(ppo: Online) -> None:
    described = json.loads((ppo["whole"] / "partitions.json").read_text())
    assert described["parameters"]
    assert not [name for name in described["parameters"] if "critic" in name or "value" in name]
    critic = json.loads((ppo["whole"] / "critic" / "partitions.json").read_text())["parameters"]
    assert critic["value_head.weight"]["shape"] == [1, 64]
    assert [name for name in critic if ".critic." in name]
    assert not [name for name in critic if ".default." in name]


def test_a_resumed_run_ends_with_identical_weights(ppo: Online) -> None:
    left = [json.loads((ppo[name] / "train.json").read_text()) for name in ("whole", "resumed")]
    assert left[0]["losses"] == left[1]["losses"]
    assert len(left[0]["losses"]) == 4
    half_way = checkpoint.open_checkpoint(ppo["whole"] / "checkpoints" / "step-00000002")
    assert len(half_way.progress.kept[MISMATCH]) == 2, "the usual mismatch of the run so far"
    files = sorted(path.relative_to(ppo["whole"]) for path in ppo["whole"].rglob("rank-*"))
    files = [path for path in files if path.parts[0] in ("shards", "critic")]
    assert len(files) == 4
    for path in files:
        assert (ppo["whole"] / path).read_bytes() == (ppo["resumed"] / path).read_bytes(), path


def test_a_run_resumes_with_another_number_of_ranks(
    ppo: Online, base: Path, data: Path, tmp_path: Path
) -> None:
    """Policy and critic come from a universal checkpoint; only the order of sums differs."""
    half_way, universal = ppo["whole"] / "checkpoints" / "step-00000002", tmp_path / "universal"
    convert(half_way, universal)
    settings = settings_with(data, launch=Launch(nproc=1, threads=1))
    alone = job_of(settings, base, data, tmp_path / "alone", resume=half_way, universal=universal)
    run(tmp_path, [alone], ranks=1)
    left = [json.loads((out / "train.json").read_text()) for out in (ppo["whole"], alone.out)]
    assert left[0]["losses"][:2] == left[1]["losses"][:2]
    assert left[0]["losses"] == pytest.approx(left[1]["losses"], rel=1e-3, abs=1e-5)


def test_learning_rate_0_changes_nothing(ppo: Online) -> None:
    after = stitched(ppo["still"])
    assert after
    assert all(not tensor.any() for name, tensor in after.items() if "lora_B" in name)
    trained = stitched(ppo["whole"])
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)


def test_an_environment_of_several_turns(ppo: Online) -> None:
    """The trainer's log-probabilities are those of sampling: it reads the same observations."""
    steps = ppo.steps[-11:-9]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert 2 < step["turns"] <= 4
        assert step["turns"] <= step["length"] < 26, "an observation has 26 tokens"
        assert step["reward"] == pytest.approx(step["reward/environment"])
        assert step["mismatch/max_abs"] < 1e-3
        assert 0 <= step["truncated"] < 1
        assert step["out_of_turns"] < 1
    metrics = json.loads((ppo["game"] / "train.json").read_text())["metrics"]
    assert metrics["heldout_reward_after"] > 0
    assert any(tensor.any() for name, tensor in stitched(ppo["game"]).items() if "lora_B" in name)


def test_the_reward_rises(ppo: Online) -> None:
    metrics = json.loads((ppo["whole"] / "train.json").read_text())["metrics"]
    assert metrics["steps"] == 4
    assert metrics["heldout_reward_after"] >= metrics["heldout_reward_before"]


def test_a_single_step_measures_during_the_update(ppo: Online) -> None:
    """The update measures old log-probabilities itself and gives the same result up to rounding.

    A tiny `kl_coef` forces the separate measurement for comparison. Without it, one forward pass is
    saved. Dropout is off, so an adapter that has it ends with the same weights.
    """
    steps = ppo.steps[-9:]
    measured = [("seconds/measure" in step) for step in steps]
    assert measured == [True] * 3 + [False] * 6
    assert all(step["mismatch/mean_abs"] >= 0 and step["entropy"] > 0 for step in steps)
    apart, *together = (stitched(ppo[name]) for name in ("apart", "on the way", "drop"))
    for key, tensor in apart.items():
        for other in together:
            torch.testing.assert_close(tensor, other[key], rtol=0, atol=1e-5)
    losses = [
        json.loads((ppo[name] / "train.json").read_text())["losses"]
        for name in ("apart", "on the way")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_dapo_with_refill_resumes_at_the_next_prompt(
    chatty: Path, data: Path, tmp_path: Path
) -> None:
    rl = {"clip_high": 0.28, "kl_coef": 0.0, "ppo_epochs": 1, "refill": 2, "mask_truncated": True}
    settings = settings_with(data, rl=rl, objective="dapo")
    whole = job_of(settings, chatty, data, tmp_path / "whole")
    half_way = whole.checkpoints / "step-00000002"
    steps = run(
        tmp_path, [whole, job_of(settings, chatty, data, tmp_path / "resumed", resume=half_way)]
    )
    assert [step["epoch"] for step in steps[4:]] == [step["epoch"] for step in steps[2:4]]
    cursor = checkpoint.open_checkpoint(half_way).progress.kept[CURSOR]
    assert cursor == steps[1]["epoch"] * 40
    assert cursor > 2 * 8, "groups without signal were replaced"
    left = [json.loads((tmp_path / n / "train.json").read_text()) for n in ("whole", "resumed")]
    assert left[0]["losses"] == left[1]["losses"]
    assert any(left[0]["losses"]), "not all responses are masked"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_optimizer_states_train_the_same(
    stage: int, base: Path, data: Path, tmp_path: Path
) -> None:
    """Uses DeepSpeed's own calls: on a CPU they copy what ZeRO-1 and 2 split, and lose links."""
    rl, zero = {"critic": "separate", "iterations": 2}, Zero(stage)
    usual = settings_with(data, rl=rl, peft=Peft(), zero=zero, save_steps=1, dtype="bfloat16")
    online: dict[str, Any] = json.loads(json.dumps(usual.online))
    online["rollout"]["offload_trainer"] = True
    jobs = [
        job_of(usual, base, data, tmp_path / "usual"),
        job_of(replace(usual, online=online), base, data, tmp_path / "moved", async_save=True),
    ]
    run(tmp_path, jobs)
    files = sorted(p.relative_to(jobs[0].out) for p in jobs[0].out.rglob("rank-*"))
    assert len([path for path in files if path.parts[0] in ("shards", "critic")]) == 4
    for path in files:
        assert (jobs[0].out / path).read_bytes() == (jobs[1].out / path).read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_and_two_learn_the_same_in_an_environment(
    stage: int, chatty: Path, data: Path, tmp_path: Path
) -> None:
    """Under ZeRO-3 ranks decode together, and each has its own limits and number of episodes."""
    rl = {"kl_coef": 0.0, "rollout_batch_size": 3, "num_generations": 2}
    batch = Batch(micro_batch_size=2, global_batch_size=6, max_len=128)
    for ranks in (1, 3):
        launch = Launch(nproc=ranks, threads=1)
        settings = settings_in_game(
            data,
            rl=rl,
            objective="grpo",
            launch=launch,
            save_steps=0,
            zero=Zero(stage),
            batch=batch,
        )
        job = job_of(settings, chatty, data, tmp_path / str(ranks))
        run(tmp_path, [job], ranks=ranks)
    one, three = (stitched(tmp_path / str(ranks)) for ranks in (1, 3))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, three[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_environment_with_vllm(chatty: Path, data: Path, tmp_path: Path) -> None:
    """Mismatch in bf16 is rounding; ranks with few episodes wait for none."""
    rl = {"mismatch_limit": 0.02, "kl_coef": 0.0, "rollout_batch_size": 3, "num_generations": 4}
    batch = Batch(micro_batch_size=2, global_batch_size=12, max_len=128)
    settings = settings_in_game(
        data, rl=rl, objective="grpo", dtype="bfloat16", batch=batch, save_steps=0
    )
    online: dict[str, Any] = json.loads(json.dumps(settings.online))
    online["rollout"] |= {"engine": "vllm", "kv_cache_gib": 0.1, "max_num_seqs": 16}
    job = job_of(replace(settings, online=online), chatty, data, tmp_path / "vllm")
    steps = run(tmp_path, [job])
    assert len(steps) == 2
    for step in steps:
        assert 2 < step["turns"] <= 4
        assert step["reward"] == pytest.approx(step["reward/environment"])


@pytest.mark.slow
def test_one_rank_and_two_learn_the_same(base: Path, data: Path, tmp_path: Path) -> None:
    rl = {"iterations": 2, "kl_coef": 0.0}
    for ranks in (1, 2):
        settings = settings_with(
            data, rl=rl, objective="grpo", launch=Launch(nproc=ranks, threads=1), save_steps=0
        )
        run(tmp_path, [job_of(settings, base, data, tmp_path / str(ranks))], ranks=ranks)
    job, two = (stitched(tmp_path / str(ranks)) for ranks in (1, 2))
    assert job.keys() == two.keys()
    for name, tensor in job.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-5)
    losses = [json.loads((tmp_path / r / "train.json").read_text())["losses"] for r in "12"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_run_killed_at_any_point_ends_with_identical_weights(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """Nine iterations of PPO in nine pieces: all but the last are killed, each at another point."""
    settings = settings_with(
        data, rl={"iterations": len(POINTS) + 1, "ppo_epochs": 1}, save_steps=1
    )
    whole = job_of(settings, base, data, tmp_path / "whole")
    run(tmp_path, [whole])
    job = job_of(settings, base, data, tmp_path / "pieces")
    for number, point in enumerate(POINTS):
        with pytest.raises(StageProcessError):
            run_to(point, tmp_path, job, rank=number % 2 if point != "save" else 0)
        good = checkpoint.last_good(job.checkpoints)
        assert good is not None
        assert good.name == checkpoint.name_of(number + 1), point
    run_to("never", tmp_path, job, rank=0)
    names = [path.relative_to(whole.out) for path in whole.out.glob("**/shards/rank-*")]
    files = sorted(path for path in names if path.parts[0] in ("shards", "critic"))
    assert len(files) == 4
    for path in files:
        assert (whole.out / path).read_bytes() == (job.out / path).read_bytes(), path
    losses = [json.loads((job.out / "train.json").read_text())["losses"] for job in (whole, job)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_resumed_run_with_nothing_left_is_still_fingerprinted(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """Stopped early, killed after that iteration's checkpoint, and started again."""
    settings = settings_with(
        data, save_steps=1, optim=Optim(lr=0.0, scheduler="constant"),
        evaluate=Evaluate(
            eval_steps=1, best_metric="reward", early_stop_patience=1, keep="last"
        ),
    )  # fmt: skip
    whole = job_of(settings, base, data, tmp_path / "whole")
    at_end = whole.checkpoints / checkpoint.name_of(2)
    resumed = job_of(settings, base, data, tmp_path / "resumed", resume=at_end)
    run(tmp_path, [whole, resumed])
    prints = [Fingerprint.load(job.out / FINGERPRINT) for job in (whole, resumed)]
    assert len(prints[0].probes) == 4
    assert prints[0].probes == prints[1].probes
    assert prints[0].logprobs.tobytes() == prints[1].logprobs.tobytes()


@pytest.mark.slow
def test_the_best_policy_is_saved_with_its_critic(base: Path, data: Path, tmp_path: Path) -> None:
    """The reward falls from the first iteration on, and the run returns to that iteration."""
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / "data" / name).symlink_to(data / name)
    (tmp_path / "data" / "reward.py").write_text(FALLING)
    jobs = []
    for iterations in (3, 1):
        settings = settings_with(
            tmp_path / "data", rl={"iterations": iterations},
            evaluate=Evaluate(eval_steps=1, best_metric="reward", keep="best"),
        )  # fmt: skip
        out = tmp_path / str(iterations)
        jobs.append(job_of(settings, base, tmp_path / "data", out, async_save=True))
    run(tmp_path, jobs)
    best, first = (job.out for job in jobs)
    assert json.loads((best / "train.json").read_text())["metrics"]["best_step"] == 1
    files = [path.relative_to(first) for path in first.rglob("rank-*")]
    files = [path for path in files if path.parts[0] in ("shards", "critic")]
    assert len(files) == 4
    for path in files:
        assert (first / path).read_bytes() == (best / path).read_bytes(), path
