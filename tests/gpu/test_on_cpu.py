"""The checks' own logic, on a CPU at a tiny size; and the suite where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.suite import CHECKS, Check, Setting, run_apart

QUICK = ("fingerprint", "attention")
"""Checks that take a second on a CPU."""


def chosen(*, quick: bool) -> list[Any]:
    chosen = [check for check in CHECKS if (check.name in QUICK) == quick]
    return [pytest.param(check, id=check.name) for check in chosen]


def on_cpu(folder: Path, name: str) -> Setting:
    check = next(check for check in CHECKS if check.name == name)
    return Setting("cpu", tiny=True, folder=folder, gpus=check.gpus)


@pytest.mark.parametrize("check", chosen(quick=True))
def test_a_quick_check_passes_on_a_cpu(check: Check, tmp_path: Path) -> None:
    assert check.run(on_cpu(tmp_path, check.name))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", chosen(quick=False))
def test_every_other_check_passes_on_a_cpu(check: Check, tmp_path: Path) -> None:
    assert run_apart(check, on_cpu(tmp_path, check.name))
