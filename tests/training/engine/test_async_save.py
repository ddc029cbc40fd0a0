"""The writer beside training and the lock of compiled operators: nothing is lost, nothing hangs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.training.engine import ops
from tasks.training.engine.async_writer import Writer, on_host


def test_copies_of_a_state_change_with_nothing() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0))
    state: dict[str, Any] = {
        "module": OrderedDict(weight=weight, view=weight[2:4]),
        "groups": [{"step": torch.tensor(3.0), "betas": (0.9, 0.999)}],
        "losses": [1.0],
    }
    copied = on_host(state)
    with torch.no_grad():
        weight.zero_()
    state["losses"].append(2.0)
    state["groups"][0]["step"] += 1
    assert copied["module"]["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert copied["module"]["view"].tolist() == [2, 3]
    assert copied["groups"] == [{"step": torch.tensor(3.0), "betas": (0.9, 0.999)}]
    assert copied["losses"] == [1.0]


def test_an_error_is_raised_once_by_the_next_check() -> None:
    writer, go = Writer(), threading.Event()

    def fail() -> None:
        go.wait()
        raise OSError(28, "No space left on device")

    writer.start(fail)
    writer.check()  # it is still writing
    go.set()
    writer.join()
    with pytest.raises(OSError, match="28"):
        writer.wait()
    writer.wait()


def test_the_lock_of_a_killed_build_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "LOOK_S", 0.02)
    lock = tmp_path / "lock"
    lock.touch()
    ops.wait_for_others(lock)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().out
