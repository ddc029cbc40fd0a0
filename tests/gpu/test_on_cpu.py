"""The checks' own logic, on a CPU at a tiny size; and the suite where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.suite import CHECKS, PROJECT, Check, Setting, run_apart

QUICK = ("fingerprint", "attention", "head")
"""Checks that take a second on a CPU."""


def chosen(*, quick: bool) -> list[Any]:
    chosen = [check for check in CHECKS if (check.name in QUICK) == quick]
    return [pytest.param(check, id=check.name) for check in chosen]


def on_cpu(folder: Path, name: str) -> Setting:
    check = next(one for one in CHECKS if one.name == name)
    return Setting("cpu", tiny=True, folder=folder, gpus=check.gpus)


@pytest.mark.parametrize("check", chosen(quick=True))
def test_a_quick_check_passes_on_a_cpu(check: Check, tmp_path: Path) -> None:
    assert check.run(on_cpu(tmp_path, check.name))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", chosen(quick=False))
def test_every_other_check_passes_on_a_cpu(check: Check, tmp_path: Path) -> None:
    assert run_apart(check, on_cpu(tmp_path, check.name))


BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
ABSENT = (
    "hypothesis", "xdist", "pytest_timeout", "pytest_randomly", "vllm", "deepspeed",
    "bitsandbytes", "peft", "prefect", "mlflow", "hydra", "omegaconf",
)  # fmt: skip


def test_without_a_gpu_and_without_our_packages_every_check_is_skipped_and_named(
    tmp_path: Path,
) -> None:
    """As on a borrowed machine: its own Python, pytest without plugins, no `make setup`."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(absent=set(ABSENT)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu or gpus"],
        cwd=PROJECT,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = sum(check.seconds for check in CHECKS)
    assert f"{len(CHECKS)} GPU checks, about {seconds / 60:.0f} minutes" in done.stdout
    table = done.stdout.split("GPU checks =")[-1]
    for check in CHECKS:
        row = next(line for line in table.splitlines() if line.startswith(f"{check.name} "))
        assert "skipped" in row
        assert "finds no CUDA GPU" in row
