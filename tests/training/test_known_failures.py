"""Failures that users report of other trainers, and the test that rules out each.

empty adapters under ZeRO-3
    tests/training/engine/test_naive_save.py::test_peft_saves_empty_tensors_under_zero3_and_partitions_do_not
`score.weight` not saved, or with a LoRA on it
    tests/training/model/test_reward_head.py::test_the_head_is_trained_in_full_and_saved_in_the_shards
two labels instead of one
    tests/training/model/test_reward_head.py::test_the_config_has_one_label
`CheckpointError`, recomputed metadata `torch.Size([0])`
    tests/training/engine/test_engine_options.py::test_gradient_checkpointing_changes_no_number
`.to` is not supported for `4-bit`
    tests/training/model/test_adapters.py::test_a_4_bit_model_is_neither_moved_nor_cast
`zip() argument 2 is longer`, of an empty parameter group
    tests/training/test_selection.py::test_one_trained_tensor_is_enough_for_every_stage
tied embeddings, and an `lm_head` that one side has and the other has not
    tests/weights/families/test_gathering.py::test_a_stored_copy_of_a_tied_head_is_written_too
pad token without a row in the embedding
    tests/training/test_pad_token.py::test_a_pad_token_without_a_row_is_named
first response token outside of the loss
    tests/training/tokens/test_chat.py::test_the_first_token_of_an_answer_bears_loss_or_the_sample_is_refused
samples skipped on resume, where an epoch is not a multiple of the batch
    tests/training/test_known_failures.py::test_no_sample_is_skipped_on_resume
best checkpoint deleted after resume
    tests/training/test_known_failures.py::test_the_best_checkpoint_outlives_a_resume
a rank that stops while the others wait
    tests/training/test_interrupted.py::test_a_rank_that_is_stopped_ends_all_of_them_within_the_timeout
"""

from __future__ import annotations

import re
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

PROJECT = Path(__file__).resolve().parents[2]
NAMED = re.findall(r"^    (tests/\S+\.py)::(\w+)$", __doc__ or "", re.M)


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_known_failure_has_its_test(path: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (PROJECT / path).read_text(), re.M)


@pytest.mark.parametrize("begun_by", [1, 2])
@pytest.mark.parametrize("taken", [2, 3, 4, 6])
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
