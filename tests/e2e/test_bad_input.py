"""Unusable input gives one clear message and the right exit status, and leaves no files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.commands import command, environment
from tests.e2e.conftest import SHORT, Run
from tests.e2e.processes import living


def conversation(prompt: str, answer: str = "yes") -> str:
    roles = (("user", prompt), ("assistant", answer))
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in roles]})


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(conversation(f"say yes {i}") for i in range(64)) + "\n")
    return path


class TestNothingStarts:
    """Refused before any process is started: exit status 2, and no folder."""

    def test_several_problems_are_one_message(
        self, rlhf: Callable[..., Run], tmp_path: Path
    ) -> None:
        done = rlhf(
            tmp_path / "runs",
            *("+exp=sft_qlora", "zero=zero3", "data=jsonl", f"data.path={tmp_path}/absent.jsonl"),
            *("peft.target_modules=[q_prj]", "train.global_batch_size=33"),
        )
        assert done.code == 2, done.output
        for part in ("zero=zero2", "peft=lora", "absent.jsonl", "q_proj", "global_batch_size"):
            assert part in done.output, part
        assert not (tmp_path / "runs").exists()

    def test_a_folder_that_another_run_uses(self, rlhf: Callable[..., Run], tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        runs.mkdir()
        with (runs / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = rlhf(runs, "+exp=sft_qlora", "paths.wait_s=0")
        assert done.code == 1
        assert "paths.wait_s=null" in done.output
        assert [p.name for p in runs.iterdir()] == [".lock"]


class TestAStageFails:
    """Exit status 1, a message of one screen, no partial artifact, every record closed."""

    @pytest.fixture
    def start(self, chain: Run, rlhf: Callable[..., Run]) -> Callable[..., Run]:
        """Run in the main job's folder, which has the toy base."""

        def run(*overrides: str) -> Run:
            done = rlhf(chain.runs, *SHORT, *overrides)
            assert done.code == 1, done.output
            assert done.summary["status"] == "failed"
            assert not list(chain.runs.glob("artifacts/*/.*.tmp")), "a staging folder was left"
            client = MlflowClient(f"sqlite:///{chain.runs}/mlflow/mlflow.db")
            run_id = done.summary["mlflow_run_id"]
            assert client.get_run(run_id).info.status == "FAILED"
            return done

        return run

    @pytest.mark.slow  # tests/training has it without a flow
    def test_a_prompt_longer_than_the_context(self, start: Callable[..., Run], chats: Path) -> None:
        lines = chats.read_text().splitlines()
        lines[40] = conversation("far too long " * 400)
        chats.write_text("\n".join(lines) + "\n")
        done = start("data=jsonl", f"data.path={chats}")
        assert "train.max_len" in done.output
        assert done.output.rstrip().count("\n") < 120

    @pytest.mark.slow  # tests/training has it without a flow
    def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(
        self, start: Callable[..., Run]
    ) -> None:
        # Decay multiplies the weights by 1 - lr * decay: they overflow within a few steps.
        done = start("train.lr=10", "train.weight_decay=1e9", "train.save_steps=1", "seed=7")
        step = re.search(r"step (\d+)", done.summary["error"])
        assert step is not None, done.summary["error"]
        assert 1 < int(step[1]) < 20
        assert re.search("nan|inf|finite", done.summary["error"])
        kept = sorted((done.runs / "checkpoints").rglob("step-*/state.json"))
        assert kept
        assert kept[-1].parent.name in done.output, done.output


@pytest.mark.slow  # tests/process has it without a flow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ranks_train_ends_everything_within_10_s(
    number: signal.Signals, status: int, chain: Run, tmp_path: Path
) -> None:
    overrides = [f"seed={status}", f"tag=signal{status}", f"paths.runs={chain.runs}"]
    argv = command("rlhf", "+exp=sft_qlora", *overrides)
    child = subprocess.Popen(
        argv, cwd=tmp_path, env=environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    lines: list[str] = []
    for line in child.stdout:
        lines.append(line)
        if "step 1/" in line:
            break
    assert len(living(chain.runs)) >= 3, "".join(lines)  # torchrun and its ranks
    sent = time.monotonic()
    os.killpg(child.pid, number)
    while any("tasks.training" in line for line in living(chain.runs)):
        assert time.monotonic() - sent < 12, "ranks live on"  # 10 s, and a busy machine
        time.sleep(0.1)
    child.communicate(timeout=60)
    assert child.returncode == status
    deadline = time.monotonic() + 5
    while living(chain.runs) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert living(chain.runs) == []
    with sqlite3.connect(chain.runs / "prefect" / "prefect.db") as db:
        unfinished = "select name from {} where state_type in ('RUNNING', 'PENDING')"
        for table in ("flow_run", "task_run"):
            assert db.execute(unfinished.format(table)).fetchall() == []
    client = MlflowClient(f"sqlite:///{chain.runs}/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "plumbline"]
    assert not client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'")
