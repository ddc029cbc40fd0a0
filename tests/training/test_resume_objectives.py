"""Resumed runs of every objective equal uninterrupted ones: same losses, same final bytes.

Like `test_resume.py` for SFT, with the state of each objective: a reward model's head, DPO's stored
reference or the base below the adapter, KTO's mismatched answers; and optimizer offload.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import StageProcessError
from tasks.training.engine.checkpoint import complete
from tasks.training.job import Evaluate, Peft, TrainJob, Zero
from tests.settings import Batch, Optim, Settings
from tests.training.datasets import answer, pair, user, write
from tests.training.places import Place, files, said
from tests.training.test_interrupted import at_step
from tests.training.test_train import _rank_pids, run_train

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
OFFLOADED = Zero(2, offload_optimizer="cpu")
CASES = {
    "reward": replace(SETTINGS, objective="reward", peft=LORA, zero=Zero(3)),
    "reward-qlora": replace(
        SETTINGS, objective="reward", peft=replace(LORA, kind="qlora"), zero=Zero(2)
    ),
    "dpo": replace(
        SETTINGS, objective="dpo", peft=LORA, zero=Zero(3), evaluate=Evaluate(eval_steps=2)
    ),
    "dpo-full": replace(SETTINGS, objective="dpo", zero=Zero(2), optim=Optim(lr=5e-4)),
    "dpo-offload": replace(SETTINGS, objective="dpo", peft=LORA, zero=OFFLOADED),
    "kto": replace(SETTINGS, objective="kto", peft=LORA, zero=Zero(2)),
    "sft-offload": replace(SETTINGS, zero=replace(OFFLOADED, stage=3)),
}


def word(draw: random.Random) -> str:
    return "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 6)))


def rows_for(objective: str, count: int) -> list[dict[str, Any]]:
    """Make rows to copy a word: the right answer and, for pairs, a wrong one."""
    draw, found = random.Random(0), []
    for number in range(count):
        right, name = word(draw), f"s{number}"
        if objective in ("reward", "dpo"):
            found.append(pair(name, f"copy {right}", right, right[::-1] + "a"))
            continue
        desirable = number % 2 == 0
        turns = [user(f"copy {right}"), answer(right if desirable else word(draw))]
        row: dict[str, Any] = {"id": name, "messages": turns}
        found.append({**row, "desirable": desirable} if objective == "kto" else row)
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a dataset per objective: 50 training and 10 evaluation examples."""
    root = tmp_path_factory.mktemp("data")
    folders = {}
    for objective in {case.objective for case in CASES.values()}:
        rows = rows_for(objective, 60)
        write(root / objective, rows[:50])
        write(root / objective, rows[50:], "heldout")
        folders[objective] = root / objective
    return folders


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, base: Path, data: dict[str, Path]
) -> dict[str, Place]:
    root = tmp_path_factory.mktemp("resume")
    return {name: Place(root, base, data[case.objective]) for name, case in CASES.items()}


def run(places: dict[str, Place], jobs: dict[str, TrainJob]) -> dict[str, TrainJob]:
    next(iter(places.values())).run(list(jobs.values()))
    return jobs


@pytest.fixture(scope="module")
def whole(places: dict[str, Place]) -> dict[str, TrainJob]:
    return run(places, {n: places[n].job(f"whole-{n}", case) for n, case in CASES.items()})


@pytest.fixture(scope="module")
def resumed(places: dict[str, Place], whole: dict[str, TrainJob]) -> dict[str, TrainJob]:
    """Resume from the checkpoints of step 3."""
    jobs = {}
    for name, case in CASES.items():
        (step_3,) = [p for p in complete(whole[name].checkpoints) if p.name == "step-00000003"]
        jobs[name] = places[name].job(f"resumed-{name}", case, resume=step_3)
    return run(places, jobs)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_evaluations_are_equal(name, whole, resumed) -> None:
    expected, found = said(whole[name]), said(resumed[name])
    assert len(found["losses"]) == 7
    assert found["losses"] == expected["losses"]
    assert len(set(found["losses"])) > 1, "it learns nothing"
    assert found["evaluations"] == expected["evaluations"]
    assert found["scores"] == expected["scores"]


@pytest.mark.parametrize("name", CASES)
def test_every_byte_that_is_published_is_equal(name, whole, resumed) -> None:
    """Only `train.json` has durations."""
    expected, found = (files(jobs[name].out) for jobs in (whole, resumed))
    assert sorted(found) == sorted(expected)
    differ = [path for path in expected if expected[path] != found[path]]
    assert differ == ["train.json"]


@pytest.mark.parametrize("name", CASES)
def test_it_resumed_and_did_not_start_from_the_beginning(name, resumed) -> None:
    steps = [path.name for path in complete(resumed[name].checkpoints)]
    assert steps[-1] == "step-00000006"
    assert "step-00000003" not in steps


@pytest.mark.parametrize("name", ["reward", "dpo-offload", "kto"])
def test_a_killed_and_restarted_run_equals_an_uninterrupted_one(
    name: str, tmp_path: Path, base: Path, data: dict[str, Path]
) -> None:
    """All ranks get kill -9 after step 5, when the checkpoint of step 4 is the newest."""
    settings = replace(CASES[name], save_steps=2)
    folders = {one: tmp_path / one for one in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    rows = data[settings.objective]
    whole = run_train(folders["whole"], base, rows, settings)

    def kill() -> None:
        for pid in _rank_pids(folders["killed"]):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(StageProcessError):
        run_train(folders["killed"], base, rows, settings, observe=at_step(5, kill))
    (folders["killed"] / "out").rename(folders["killed"] / "broken")
    again = run_train(folders["killed"], base, rows, settings)
    assert again.report.notes["resumed_after_step"] >= 4
    assert again.json("train.json")["losses"] == whole.json("train.json")["losses"]
    expected, found = files(whole.out), files(again.out)
    assert [path for path in expected if expected[path] != found.get(path)] == ["train.json"]
