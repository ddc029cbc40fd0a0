"""Evaluations, best checkpoint and early stopping; ranks and rows do not change the result."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.training.engine.checkpoint import complete
from tasks.training.job import Evaluate, Peft, TrainJob, Zero
from tests.commands import run_ranks
from tests.settings import Batch, Launch, Optim, Settings
from tests.training.places import Place, said, weights

LORA = Peft("lora", rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
# A rate that rises until nothing is learned any more: the best state is not the last one.
RISING = Settings(
    peft=LORA,
    zero=Zero(2),
    optim=Optim(lr=1.0, scheduler="linear", warmup_ratio=1.0),
    batch=Batch(micro_batch_size=8, global_batch_size=16, max_steps=8, max_len=64),
    evaluate=Evaluate(eval_steps=2, keep="best"),
    save_steps=1,
    max_ckpt_num=1,
    probes=3,
)
COURSES = {
    "best": RISING,
    "best-3": replace(RISING, peft=Peft(), zero=Zero(3)),
    "patience": replace(RISING, evaluate=Evaluate(eval_steps=2, early_stop_patience=1)),
    "more-than-there-is": replace(
        RISING,
        optim=Optim(lr=1e-3),
        batch=Batch(micro_batch_size=32, global_batch_size=192, max_steps=2, max_len=64),
        evaluate=Evaluate(),
        save_steps=0,
    ),
}


class TestCourse:
    @pytest.fixture(scope="module")
    @staticmethod
    def left(tmp_path_factory, base: Path, dataset: Path) -> dict[str, TrainJob]:
        place = Place(tmp_path_factory.mktemp("course"), base, dataset)
        jobs = {name: place.job(name, settings) for name, settings in COURSES.items()}
        place.run(list(jobs.values()))
        return jobs

    @pytest.mark.parametrize("name", ["best", "best-3"])
    @pytest.mark.slow
    def test_the_best_weights_are_published_not_the_last(self, name, left) -> None:
        job, document = left[name], said(left[name])
        losses = {e["step"]: e["loss"] for e in document["evaluations"]}
        best = int(document["metrics"]["best_step"])
        assert list(losses) == [2, 4, 6, 8]
        assert best == min(losses, key=losses.__getitem__) != 8
        assert document["metrics"]["heldout_loss_after"] == losses[best]
        assert len(document["losses"]) == 8
        stored = job.checkpoints / f"step-{best:08d}" / "shards"
        for path in sorted(stored.iterdir()):
            assert (job.out / "shards" / path.name).read_bytes() == path.read_bytes()

    @pytest.mark.parametrize("name", ["best", "best-3"])
    def test_the_best_and_the_last_checkpoint_are_kept(self, name, left) -> None:
        best = int(said(left[name])["metrics"]["best_step"])
        kept = [path.name for path in complete(left[name].checkpoints)]
        assert kept == [f"step-{best:08d}", "step-00000007"]

    def test_early_stopping(self, left) -> None:
        document = said(left["patience"])
        best = document["metrics"]["best_step"]
        assert len(document["losses"]) == document["metrics"]["steps"] == best + 2 < 8
        assert document["metrics"]["heldout_loss_after"] == document["evaluations"][-1]["loss"]

    def test_a_batch_larger_than_the_dataset(self, left) -> None:
        assert len(said(left["more-than-there-is"])["losses"]) == 2


@pytest.mark.slow
def test_one_trained_tensor_is_enough_for_every_stage(tmp_path: Path) -> None:
    """torch >= 2.10 fails on an empty parameter group with some versions of DeepSpeed.

    (`zip() argument 2 is longer`.) There is always one group, and its few elements are partitioned
    and padded.
    """
    log_path = tmp_path / "train.log"
    run_ranks("tests.training.one_tensor", log_path=log_path)
    lines = [line.split() for line in log_path.read_text().splitlines()]
    found = [line for line in lines if line[1:2] == ["stage"]]
    stages = [[f"{stage}:", "1"] for stage in range(4)]
    assert [line[2:4] for line in found] == stages * 2
    for dtype in ("bfloat16", "float32"):
        (measured,) = {tuple(map(float, line[4:])) for line in found if line[0] == dtype}
        before, after, norm = measured
        assert after < before
        assert norm > 0.1  # told under every stage, and before it is clipped to 1


def pairs(folder: Path) -> Path:
    """Write 40 training and 8 evaluation pairs of unequal lengths."""
    folder.mkdir()
    draw = random.Random(1)

    def row(i: int) -> dict[str, object]:
        words = ["".join(draw.choice("abc") for _ in range(draw.randint(2, 12))) for _ in "123"]
        turns = [{"role": "assistant", "content": word} for word in words[1:]]
        prompt = [{"role": "user", "content": words[0]}]
        return {"id": f"p{i}", "prompt": prompt, "chosen": turns[:1], "rejected": turns[1:]}

    for split, count in (("train", 40), ("heldout", 8)):
        lines = [json.dumps(row(i)) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


SHARED = Settings(
    peft=LORA,
    zero=Zero(2),
    dtype="float32",
    optim=Optim(lr=1e-3, weight_decay=0.1),
    batch=Batch(global_batch_size=8, max_steps=5, max_len=64),
    save_steps=0,
    probes=3,
)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sft", "dpo"])
class TestSharing:
    """Loss and weights do not depend on ranks and micro-batches (fp32, 1e-5)."""

    @pytest.fixture(scope="module")
    @staticmethod
    def left(tmp_path_factory, base: Path, dataset: Path) -> dict[tuple[str, int, int], TrainJob]:
        root = tmp_path_factory.mktemp("sharing")
        data = {"sft": dataset, "dpo": pairs(root / "pairs")}
        jobs = {}
        for nproc, micros in ((1, (8, 1)), (2, (4, 1)), (4, (2,))):
            for objective, folder in data.items():
                place = Place(root, base, folder)
                for micro in micros:
                    settings = replace(
                        SHARED,
                        objective=objective,
                        launch=Launch(nproc=nproc),
                        batch=replace(SHARED.batch, micro_batch_size=micro),
                    )
                    key = (objective, nproc, micro)
                    jobs[key] = place.job("-".join(map(str, key)), settings)
            place.run([job for key, job in jobs.items() if key[1] == nproc], nproc)
        return jobs

    @pytest.mark.parametrize("shared", [(1, 1), (2, 4), (2, 1), (4, 2)])
    def test_losses_and_weights(self, objective, shared, left) -> None:
        one, other = left[objective, 1, 8], left[objective, *shared]
        assert said(other)["losses"] == pytest.approx(said(one)["losses"], rel=1e-5)
        found = weights(other)
        for name, tensor in weights(one).items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
