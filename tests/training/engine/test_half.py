"""float16 under DeepSpeed's loss scaling: overflowing steps are skipped, reported and resumed.

The preflight refuses float16 on a CPU without AVX-512 FP16; see `half_jobs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.training.engine.checkpoint import complete
from tasks.training.job import Peft, TrainJob, Zero
from tests.settings import Batch, Optim, Settings
from tests.training.places import Place, files, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = Settings(
    dtype="float16",
    peft=Peft("lora", rank=4, alpha=8, dropout=0.1),
    optim=Optim(lr=5e-3, warmup_ratio=0.2),
    batch=Batch(micro_batch_size=8, global_batch_size=16, max_steps=20, max_len=64),
    save_steps=3,
    max_ckpt_num=0,
    probes=3,
)
CASES = {
    "lora-1": replace(SETTINGS, zero=Zero(1)),
    "full-2": replace(SETTINGS, peft=Peft(), zero=Zero(2)),
    "lora-3": replace(SETTINGS, zero=Zero(3, persistence_threshold=0)),
}
Steps = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, base: Path, dataset: Path) -> Place:
    return Place(tmp_path_factory.mktemp("half"), base, dataset)


def by_job(names: Iterable[str], events: list[dict[str, Any]]) -> Steps:
    """Return the events "step" of each job; a job ends with "done"."""
    found: Steps = {name: [] for name in names}
    left = list(found)
    for event in events:
        if event["event"] == "step":
            found[left[0]].append(event)
        elif event["event"] == "done":
            del left[0]
    assert not left
    return found


@pytest.fixture(scope="module")
def whole(place: Place) -> tuple[dict[str, TrainJob], Steps]:
    jobs = {name: place.job(f"whole-{name}", settings) for name, settings in CASES.items()}
    return jobs, by_job(jobs, place.run(list(jobs.values()), program="engine.half_jobs"))


@pytest.fixture(scope="module")
def resumed(place: Place, whole) -> tuple[dict[str, TrainJob], Steps]:
    """Resume from the checkpoints of step 3, at which the scale is still too large."""
    jobs = {
        name: place.job(f"resumed-{name}", CASES[name], resume=complete(job.checkpoints)[0])
        for name, job in whole[0].items()
    }
    return jobs, by_job(jobs, place.run(list(jobs.values()), program="engine.half_jobs"))


@pytest.mark.parametrize("name", CASES)
def test_steps_that_overflow_are_skipped_and_reported(name: str, whole) -> None:
    steps = whole[1][name]
    skipped = [bool(one["skipped"]) for one in steps]
    assert len(steps) == 20
    first = skipped.index(False)
    assert 3 < first < 15  # the scale is halved until nothing overflows
    assert sum(skipped[first:]) <= 2  # gradients may grow
    metrics = said(whole[0][name])["metrics"]
    assert metrics["heldout_loss_after"] < metrics["heldout_loss_before"] - 0.1


@pytest.mark.parametrize("name", CASES)
def test_the_scale_outlives_a_resume(name: str, whole, resumed) -> None:
    """With a scale reset to 2**24 more steps would be skipped."""
    old, new = whole[0][name], resumed[0][name]
    assert [s["skipped"] for s in resumed[1][name]] == [s["skipped"] for s in whole[1][name][3:]]
    assert said(new)["losses"] == said(old)["losses"]
    expected, found = files(old.out), files(new.out)
    assert [path for path in expected if expected[path] != found[path]] == ["train.json"]
