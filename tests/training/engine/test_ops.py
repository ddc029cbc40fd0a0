"""DeepSpeed's CPUAdam is built before the ranks start, and a killed build blocks no later one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.process.launch import python_child
from tasks.train import build_ops, train
from tasks.training.engine import ops
from tasks.training.job import Peft, Zero
from tests.settings import Batch, Settings
from tests.training.places import LOG

OFFLOADED = Settings(
    peft=Peft("lora", rank=2, alpha=4),
    zero=Zero(2, offload_optimizer="cpu"),
    batch=Batch(micro_batch_size=4, global_batch_size=8, max_steps=1, max_len=64),
    save_steps=0,
    probes=1,
)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "LOOK_S", 0.02)


@pytest.mark.usefixtures("soon")
def test_an_abandoned_lock_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    ops.wait_for_others(lock)
    assert not lock.exists()
    assert f"removing {lock}" in capsys.readouterr().out


@pytest.mark.usefixtures("soon")
def test_a_lock_that_a_process_holds_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Like torch, the process creates the file, keeps it open and removes it after the build."""
    lock = tmp_path / "lock"
    hold = (
        "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        waiting = threading.Thread(target=ops.wait_for_others, args=(lock,))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert lock.exists()
        lock.unlink()
        waiting.join(10)
        assert not waiting.is_alive()
        holder.communicate(b"\n")
    assert capsys.readouterr().out == ""


def test_nothing_is_built_where_nothing_is_offloaded() -> None:
    def run(*_: object, **__: object) -> list[str]:
        raise AssertionError("it started a process")

    build_ops(replace(OFFLOADED, zero=Zero(2)), run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_goes_on_after_a_killed_build(
    tmp_path: Path, base: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    killed = subprocess.Popen(
        python_child("tasks.training.engine.ops"),
        cwd=Path(__file__).resolve().parents[3],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not lock.exists():
        assert killed.poll() is None
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert lock.exists()
    out = tmp_path / "out"
    out.mkdir()
    report = train(
        out,
        base=base,
        data=dataset,
        base_digest="b" * 64,
        settings=OFFLOADED,
        checkpoints=tmp_path / "checkpoints",
        log=LOG,
        log_path=tmp_path / "log",
    )
    assert all(check.ok for check in report.checks)
    assert not lock.exists()
    assert f"removing {lock}" in (tmp_path / "log").read_text()
