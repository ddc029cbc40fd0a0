"""GPUs as the driver lists them and as CUDA shows them, and a torch that cannot compute on them."""

from __future__ import annotations

import pytest

from tasks.config.checks.machine import device
from tasks.core import machine
from tasks.core.machine import Gpu, driver_too_old, visible
from tasks.train import rank_environment
from tests.machines import GIB, with_gpus
from tests.settings import Launch

TWO = (Gpu("GPU-aa11", 1), Gpu("GPU-ab22", 2), Gpu("GPU-cc33", 3))


def test_cuda_visible_devices() -> None:
    shown = {
        None: [1, 2, 3], "": [], "-1": [], "0,-1,1": [1], "2,0": [3, 1], "0, 1": [1, 2],
        "1,0,1": [],  # a device twice
        "GPU-cc33,GPU-aa": [3, 1],
        "GPU-a": [],  # two begin so
    }  # fmt: skip
    for wanted, memory in shown.items():
        assert [gpu.memory for gpu in visible(TWO, wanted)] == memory, wanted
    assert visible(TWO, "MIG-22,MIG-11") == (Gpu("MIG-22", 1),)
    assert visible((), "MIG-22") == ()


def test_gpus_follow_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2, memory=3)
    assert (machine.gpu_count(), machine.gpu_memory(), machine.has_gpu()) == (2, 3, True)
    assert (machine.has_gpu("cpu"), machine.gpu_memory("cpu")) == (False, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (machine.gpu_count(), machine.gpu_memory(), machine.has_gpu()) == (0, None, False)


def test_a_driver_too_old_is_named_with_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 8, driver="535.129.03", cuda=(12, 2))
    (finding,) = device("auto", 8)
    assert "535.129.03" in finding.found
    assert "580" in finding.allowed
    assert [*device("cpu", 8)] == []
    with_gpus(monkeypatch, 1, torch=("2.13.0+cpu", None))
    (finding,) = device("auto", 1)
    assert "make setup PROFILE=cuda" in finding.override
    (finding,) = device("auto", 2, embedded=True)  # made for CPUs
    assert finding.severity == "warning"
    assert not machine.has_gpu()
    assert machine.gpu_memory() is None
    with_gpus(monkeypatch, 8)
    assert driver_too_old() is None
    assert [*device("auto", 8), *device("cuda", 8)] == []


def test_a_rank_does_not_train_on_the_cpu_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No version explains it: `torch.cuda.is_available()` is False here."""
    import torch

    from tasks.training.engine.deepspeed_engine import choose_device

    cpu = torch.device("cpu")
    with_gpus(monkeypatch, 2, memory=GIB)
    assert choose_device("auto", 0) == torch.device("cuda", 0)  # which torch then refuses
    assert choose_device("cpu", 0) == cpu
    assert rank_environment(Launch(device="cpu"))["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(Launch())
    with_gpus(monkeypatch, 0)
    assert choose_device("auto", 0) == cpu
    assert choose_device("cuda", 0) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 2) == cpu
