"""The checks of `suite.py`: on real GPUs (`make test-gpu`), and at a tiny size on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.suite import CHECKS, Check, Setting, missing, run_apart

QUICK = ("fingerprint", "attention")
"""Checks that take a second on a CPU."""
MACHINE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.cuda.mem_get_info(i)[0] >> 30 for i in range(count)]))
"""


@pytest.fixture(scope="session")
def free_gib() -> list[int]:
    """Free memory of each GPU, GiB; torch is asked in a child, as this process never imports it."""
    command = [sys.executable, "-c", MACHINE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    free: list[int] = json.loads(done.stdout.splitlines()[-1])
    return free


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all checks of a session share: models are made once."""
    return tmp_path_factory.mktemp("gpu")


def marked(check: Check) -> Any:
    mark = pytest.mark.gpus if check.gpus > 1 else pytest.mark.gpu
    limit = pytest.mark.timeout(3 * check.seconds + 60)
    return pytest.param(check, id=check.name, marks=[mark, limit])


@pytest.mark.parametrize("check", [marked(check) for check in CHECKS])
def test_on_a_gpu(check: Check, free_gib: list[int], place: Path) -> None:
    if sum(free >= check.gib for free in free_gib) < check.gpus:
        pytest.skip(f"{check.gpus} GPUs with {check.gib} GiB needed; free here: {free_gib} GiB")
    if absent := missing(check):
        pytest.skip(f"not installed: {', '.join(absent)}")
    print(check.name, run_apart(check, Setting("cuda", tiny=False, folder=place, gpus=check.gpus)))


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.slow])
        for c in CHECKS
    ],
)
@pytest.mark.timeout(900)
def test_on_a_cpu(check: Check, tmp_path: Path) -> None:
    setting = Setting("cpu", tiny=True, folder=tmp_path, gpus=check.gpus)
    assert check.run(setting) if check.name in QUICK else run_apart(check, setting)
