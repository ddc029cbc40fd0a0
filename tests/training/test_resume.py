"""A resumed run equals an uninterrupted one: same losses, same final bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.training.engine.checkpoint import complete
from tasks.training.engine.universal import convert
from tasks.training.job import Evaluate, Peft, TrainJob, Zero
from tests.settings import Batch, Optim, Settings
from tests.training.places import Place, files, said, weights

pytestmark = pytest.mark.slow
LORA = Peft("lora", rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "down_proj"))
SETTINGS = Settings(
    optim=Optim(lr=5e-3, warmup_ratio=0.2),
    # 50 examples and 16 a step: steps 4 and 7 take examples of two epochs.
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=7, max_len=64),
    save_steps=3,
    max_ckpt_num=0,
    probes=3,
)
CASES = {
    "lora-0": replace(SETTINGS, peft=LORA, zero=Zero(0)),
    "full-1": replace(SETTINGS, zero=Zero(1)),
    "qlora-2": replace(SETTINGS, peft=replace(LORA, kind="qlora"), zero=Zero(2)),
    "fp32-2": replace(SETTINGS, peft=replace(LORA, dropout=0.0), zero=Zero(2), dtype="float32"),
    "lora-3": replace(SETTINGS, peft=LORA, zero=Zero(3), gradient_checkpointing=True),
    "8bit-2": replace(
        SETTINGS,
        peft=LORA,
        zero=Zero(2),
        optim=replace(SETTINGS.optim, optimizer="adamw_8bit"),
    ),
    "full-3": replace(SETTINGS, zero=Zero(3), evaluate=Evaluate(eval_steps=2)),
}


ASYNC = ("full-1", "8bit-2", "lora-3", "lora-0")
"""Cases whose checkpoints are written beside training."""
CONVERTIBLE = [name for name in CASES if CASES[name].optim.optimizer == "adamw"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, base: Path, dataset: Path) -> Place:
    root = tmp_path_factory.mktemp("resume")
    small = root / "dataset"
    small.mkdir()
    lines = (dataset / "train.jsonl").read_text().splitlines(keepends=True)
    (small / "train.jsonl").write_text("".join(lines[:50]))
    (small / "heldout.jsonl").write_text((dataset / "heldout.jsonl").read_text())
    return Place(root, base, small)


@pytest.fixture(scope="module")
def whole(place: Place) -> dict[str, TrainJob]:
    """Train every case without interruption, with checkpoints of steps 3 and 6."""
    jobs = {
        name: place.job(f"whole-{name}", settings, async_save=name in ASYNC)
        for name, settings in CASES.items()
    }
    place.run(list(jobs.values()))
    return jobs


def step_3(job: TrainJob) -> Path:
    return next(p for p in complete(job.checkpoints) if p.name == "step-00000003")


@pytest.fixture(scope="module")
def resumed(place: Place, whole: dict[str, TrainJob]) -> dict[str, TrainJob]:
    """Resume from the checkpoints of step 3 with the same number of ranks."""
    jobs = {
        name: place.job(f"resumed-{name}", CASES[name], resume=step_3(job))
        for name, job in whole.items()
    }
    place.run(list(jobs.values()))
    return jobs


@pytest.fixture(scope="module")
def alone(place: Place, whole: dict[str, TrainJob]) -> dict[str, TrainJob]:
    """Resume from the checkpoints of step 3 with one rank instead of two."""
    jobs = {}
    for name in CONVERTIBLE:
        job = whole[name]
        settings = replace(CASES[name], launch=replace(CASES[name].launch, nproc=1))
        universal = None
        if settings.zero.stage:
            universal = place.root / f"universal-{name}"
            convert(step_3(job), universal)
        jobs[name] = place.job(f"alone-{name}", settings, resume=step_3(job), universal=universal)
    place.run(list(jobs.values()), nproc=1)
    return jobs


class TestTheSameRanks:
    @pytest.mark.parametrize("name", CASES)
    def test_losses_and_evaluations_are_equal(self, name, whole, resumed) -> None:
        expected, found = said(whole[name]), said(resumed[name])
        assert len(found["losses"]) == 7
        assert found["losses"] == expected["losses"]
        assert found["evaluations"] == expected["evaluations"]

    @pytest.mark.parametrize("name", CASES)
    def test_every_byte_that_is_published_is_equal(self, name, whole, resumed) -> None:
        """Only `train.json` has durations."""
        expected, found = (files(jobs[name].out) for jobs in (whole, resumed))
        assert sorted(found) == sorted(expected)
        differ = [path for path in expected if expected[path] != found[path]]
        assert differ == ["train.json"]

    @pytest.mark.parametrize("name", CASES)
    def test_it_resumed_and_did_not_start_from_the_beginning(self, name, resumed) -> None:
        steps = [path.name for path in complete(resumed[name].checkpoints)]
        assert steps[-1] == "step-00000006"
        assert "step-00000003" not in steps


class TestOtherRanks:
    """Another number of ranks changes the order of sums, so only rounding may differ.

    Dropout depends on the rank: of cases with dropout only the first step is compared.
    """

    @pytest.mark.parametrize("name", [n for n in CONVERTIBLE if CASES[n].peft.dropout == 0])
    def test_losses_agree(self, name, whole, alone) -> None:
        expected, found = said(whole[name])["losses"], said(alone[name])["losses"]
        assert found[:3] == expected[:3]
        bf16 = CASES[name].dtype == "bfloat16"
        assert found == pytest.approx(expected, rel=1e-2 if bf16 else 1e-5)

    @pytest.mark.parametrize("name", CONVERTIBLE)
    def test_the_first_loss_is_that_of_the_saved_weights(self, name, whole, alone) -> None:
        expected, found = said(whole[name])["losses"], said(alone[name])["losses"]
        assert found[:3] == expected[:3]
        assert found[3] == pytest.approx(expected[3], rel=3e-2)

    def test_weights_agree_in_fp32(self, whole, alone) -> None:
        expected, found = weights(whole["fp32-2"]), weights(alone["fp32-2"])
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5)


def test_ranks_that_share_rows_after_the_interruption(
    place: Place, whole: dict[str, TrainJob]
) -> None:
    """`train.sequence_parallel` may change: losses and weights are the same in fp32."""
    settings, before = CASES["fp32-2"], whole["fp32-2"]
    sharing = replace(settings, launch=replace(settings.launch, sequence_parallel=2))
    job = place.job("shared", sharing, resume=step_3(before))
    assert job.identity == before.identity
    place.run([job])
    expected, resumed = said(before)["losses"], said(job)["losses"]
    assert resumed[:3] == expected[:3]
    assert resumed == pytest.approx(expected, rel=1e-5)
    stored, loaded = weights(before), weights(job)
    for name, tensor in stored.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=2e-5)
