"""A resumed run skips no sample and keeps its best checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tasks.training.engine import checkpoint, saving
from tasks.training.engine.checkpoint import Best, Progress
from tasks.training.job import Evaluate, TrainJob
from tasks.training.resume import begin
from tasks.training.selection import judge
from tasks.training.tokens.order import Order
from tests.settings import Batch, Settings
from tests.training.datasets import make_examples


@pytest.mark.parametrize("begun_by", [1, 2])
@pytest.mark.parametrize("taken", [3, 4])
def test_no_sample_is_skipped_on_resume(begun_by: int, taken: int) -> None:
    """With 50 examples and 16 per step, every fourth step is the last of an epoch and has two.

    A run is interrupted after `taken` steps and resumed by any number of ranks: no example is
    repeated before all were used. (test_resume.py tests real runs.)
    """
    examples = make_examples([3 + i % 7 for i in range(50)])
    batch = Batch(micro_batch_size=4, global_batch_size=16, max_steps=32)
    seen = Counter(dict.fromkeys(range(50), 0))
    for world, steps in ((begun_by, range(1, taken + 1)), (2, range(taken + 1, 33))):
        order = Order(examples, batch, seed=3, world_size=world)
        for step in steps:
            for rank in range(world):
                rows = order.step(step, rank).rows
                seen.update(i for row in rows if row.counted for i in row.chosen)
            assert seen.total() == 50 * (step // 4) + 16 * (step % 4)
            assert max(seen.values()) - min(seen.values()) <= 1
    assert set(seen.values()) == {8}


def test_the_best_checkpoint_outlives_a_resume(tmp_path: Path) -> None:
    """With `max_ckpt_num=1` the best checkpoint is kept beside the newest one.

    New checkpoints replace only the newest one, until there is a better one.
    """
    settings = Settings(save_steps=1, max_ckpt_num=1, evaluate=Evaluate(eval_steps=1))
    job = TrainJob(settings, tmp_path, "b", tmp_path, tmp_path / "out", tmp_path / "checkpoints")
    progress = Progress()
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        _save(job, progress, step, loss)
    assert _kept(job) == [2, 3]

    job, progress = begin(job, "auto", to_universal=_refuse)
    assert job.resume == job.checkpoints / checkpoint.name_of(3)
    assert (progress.step, progress.best) == (3, Best(2, 1.0))
    for step, loss, kept in ((4, 2.5, [2, 4]), (5, 1.5, [2, 5]), (6, 0.5, [6]), (7, 0.7, [6, 7])):
        _save(job, progress, step, loss)
        assert _kept(job) == kept


def _save(job: TrainJob, progress: Progress, step: int, loss: float) -> None:
    """Save a checkpoint without tensors, as `loop.py` and `saving.py` do after a step."""
    progress.step = step
    judge(progress, {"loss": loss}, job.settings.evaluate, -1)
    work = checkpoint.work_folder(job.checkpoints, step)
    work.mkdir(parents=True)
    checkpoint.describe(
        work, world_size=2, identity=dict(job.identity), progress=progress, files={}
    )
    checkpoint.publish(work)
    saving._prune(job, progress)


def _kept(job: TrainJob) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.complete(job.checkpoints)]


def _refuse(engine: Path, universal: Path) -> None:
    raise AssertionError("the number of ranks is the same")
