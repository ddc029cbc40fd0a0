"""Checkpoint folders: complete ones, pruned ones, and those that a run may resume from."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.core.errors import ConfigError, TrainingError
from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Best, Progress, begin, choose, identity
from tasks.training.engine.deepspeed_engine import SingleRank
from tasks.training.job import Evaluate, Loss, TrainJob, Zero
from tasks.training.selection import direction, has_ended, judge
from tests.settings import Batch, Launch, Optim, Settings

WANTED = {"base": "b", "data": "d", "seed": 0}


def make(root: Path, step: int, **about: Any) -> Path:
    work = checkpoint.work_folder(root, step)
    (work / "engine").mkdir(parents=True)
    about = {"world_size": 2, "identity": WANTED, "progress": Progress(step), **about}
    return checkpoint.publish(work, **about)


def steps(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.complete(root)]


@pytest.mark.parametrize(
    ("keep", "most", "left"),
    [({2}, 3, [2, 4, 5]), ({2}, 1, [2, 5]), (set(), 0, [1, 2, 3, 4, 5])],
)
def test_the_oldest_go_and_best_and_last_stay(
    tmp_path: Path, keep: set[int], most: int, left: list[int]
) -> None:
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    checkpoint.prune(tmp_path, keep=keep, most=most)
    assert steps(tmp_path) == left


class Writer:
    """An engine that writes with torch, as DeepSpeed's does."""

    module = torch.nn.Linear(64, 64)

    def __init__(self) -> None:
        self.checkpoint_engine = SimpleNamespace(save=torch.save)

    def save_checkpoint(self, folder: str, *, tag: str, **_: Any) -> None:
        (Path(folder) / tag).mkdir()
        self.checkpoint_engine.save(self.module.state_dict(), Path(folder) / tag / "states.pt")
        self._copy_recovery_script(folder)

    def _copy_recovery_script(self, folder: str) -> None:
        (Path(folder) / "zero_to_fp32.py").write_text(" " * 20_000)


@pytest.mark.parametrize(("last", "room"), [(False, False), (True, False), (True, True)])
def test_a_full_disk_at_the_last_step_loses_no_training(
    tmp_path: Path, last: bool, room: bool
) -> None:
    job = TrainJob(Settings(), tmp_path, "b", tmp_path, tmp_path / "out", tmp_path / "checkpoints")
    make(job.checkpoints, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = nullcontext() if last else pytest.raises(TrainingError, match="step 2 could not")
    try:
        if not room:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        with refused as caught:
            saving.save(Writer(), job, SingleRank(), Progress(2), last=last)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if not last:
        assert "train.save_steps=0" in caught.value.hint
    assert steps(job.checkpoints) == ([1, 2] if room else [1])
    assert not list(job.checkpoints.glob(".step-*")) or not last


def test_an_unfinished_one_does_not_count_and_is_deleted(tmp_path: Path) -> None:
    progress = Progress(
        1, [1.5, float("nan")], {"loss": 1.0}, {"loss": 2.0}, [{"step": 2.0}], Best(2, 0.5), 1
    )
    done = make(tmp_path, 1, progress=progress)
    unfinished = checkpoint.work_folder(tmp_path, 2)
    unfinished.mkdir()
    (tmp_path / "step-00000003").mkdir()
    assert checkpoint.last_good(tmp_path) == done
    opened = checkpoint.open_checkpoint(done)
    assert str(asdict(opened.progress)) == str(asdict(progress))
    assert (opened.world_size, opened.identity) == (2, WANTED)
    make(tmp_path, 4)
    checkpoint.sweep(tmp_path)
    assert not unfinished.exists()
    assert steps(tmp_path) == [1, 4]
    checkpoint.sweep(tmp_path, after=1)
    assert steps(tmp_path) == [1]


def test_auto_never_and_a_folder_choose_a_checkpoint(tmp_path: Path) -> None:
    root, other = tmp_path / "checkpoints" / "mine", tmp_path / "checkpoints" / "other"
    assert choose("auto", root, WANTED) is None
    first, last, newest = make(root, 1), make(root, 2), make(other, 3)
    for how, path in (("auto", last), (str(first), first), (str(other), newest)):
        chosen = choose(how, root, WANTED)
        assert chosen is not None
        assert chosen.path == path
    assert choose("never", root, WANTED) is None


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """DeepSpeed would unpickle it, and its `state.json` can be copied from any run."""
    root = tmp_path / "checkpoints" / "mine"
    (root / "empty").mkdir(parents=True)
    outside = make(tmp_path / "theirs", 1)
    (root / "link").symlink_to(outside)
    for path in (root / "gone", root / "empty", outside, root / "link"):
        with pytest.raises(ConfigError, match=str(path)):
            choose(str(path), root, WANTED)


def test_every_difference_to_another_run_is_named(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with pytest.raises(ConfigError) as caught:
        choose("auto", tmp_path, {**WANTED, "data": "e", "peft.rank": 8})
    assert [line.partition(":")[0] for line in caught.value.details] == ["data", "peft.rank"]


@pytest.mark.parametrize(
    ("changes", "best", "problem"),
    [
        ({"evaluate": Evaluate(eval_steps=1, keep="best")}, Best(1, 0.5), "keep=best"),
        ({"optim": Optim(optimizer="adamw_8bit")}, None, "adamw_8bit"),
        ({}, Best(1, 0.5), ""),
    ],
)
def test_another_number_of_ranks_takes_only_states_that_can_be_converted(
    tmp_path: Path, changes: dict[str, Any], best: Best | None, problem: str
) -> None:
    settings = Settings(zero=Zero(2), launch=Launch(nproc=1), **changes)
    job = TrainJob(settings, tmp_path, "b", tmp_path, tmp_path / "out", tmp_path / "checkpoints")
    make(job.checkpoints, 1, identity={}, progress=Progress(1, best=best))
    converted: list[Path] = []
    if problem:
        with pytest.raises(ConfigError, match=problem):
            begin(job, "auto", to_universal=lambda *paths: converted.extend(paths))
    else:
        job, _ = begin(job, "auto", to_universal=lambda *paths: converted.extend(paths))
        assert converted == [job.resume, job.universal]


def test_the_identity_covers_everything_that_determines_the_result(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")

    def of(base: str = "b", **changes: Any) -> dict[str, Any]:
        return identity(Settings(**changes), base_digest=base, data=tmp_path)

    first = of()
    free = {"launch": Launch(nproc=8), "batch": Batch(1), "evaluate": Evaluate(eval_steps=5)}
    assert of(**free, save_steps=7) == first
    others: tuple[dict[str, Any], ...] = (
        {"seed": 1},
        {"zero": Zero(3)},
        {"loss": Loss(beta=0.1)},
        {"batch": Batch(global_batch_size=128)},
        {"dtype": "float32"},
        {"evaluate": Evaluate(best_metric="accuracy")},  # 0.9 is no better than 1.3
        {"base": "c"},
    )
    assert all(of(**changes) != first for changes in others)
    (tmp_path / "train.jsonl").write_text("{ }\n")
    assert of() != first
    wanted = of(peft=replace(Settings().peft, target_modules=("q_proj",)))
    root = tmp_path / "checkpoints"
    make(root, 1, identity=wanted)
    assert choose("auto", root, wanted) is not None, "tuples survive the file"


def test_the_best_is_remembered_and_waiting_ends() -> None:
    progress, how = Progress(), Evaluate(eval_steps=1, early_stop_patience=2)
    verdicts = []
    for step, loss in enumerate([3.0, 2.0, 2.0, float("nan"), 1.0], 1):
        progress.step = step
        verdicts.append((judge(progress, {"loss": loss}, how, -1), has_ended(progress, how, 9)))
    assert verdicts == [(True, False), (True, False), (False, False), (False, True), (True, False)]
    assert progress.best == Best(5, 1.0)
    assert [direction("sft", "loss"), direction("ppo", "reward")] == [-1, 1]
    assert [e["step"] for e in progress.evaluations] == [1, 2, 3, 4, 5]
