"""Packages and GPUs of the machine, reasons to skip a check, and the table at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.suite import Check, Setting, missing

ROWS = pytest.StashKey[list[str]]()
MACHINE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.cuda.mem_get_info(i)[0] >> 30 for i in range(count)]))
"""


@pytest.fixture(scope="session")
def free_gib() -> list[int]:
    """Free memory of each GPU, GiB; torch is asked in a child, as this process never imports it."""
    done = subprocess.run(
        [sys.executable, "-c", MACHINE], capture_output=True, text=True, check=True
    )
    free: list[int] = json.loads(done.stdout.splitlines()[-1])
    return free


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all checks of a session share: models are made once."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture
def setting(free_gib: list[int], place: Path, check: Check) -> Setting:
    """The check's setting on this machine; skips what cannot run."""
    fit = [free for free in free_gib if free >= check.gib]
    if len(fit) < check.gpus:
        pytest.skip(f"{check.gpus} GPUs with {check.gib} GiB needed; free here: {free_gib} GiB")
    if absent := missing(check):
        pytest.skip(f"not installed: {', '.join(absent)}")
    return Setting("cuda", tiny=False, folder=place, gpus=check.gpus)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note each check's line of the summary."""
    report = yield
    gpu = item.get_closest_marker("gpu") or item.get_closest_marker("gpus")
    if gpu and (call.when == "call" or (call.when == "setup" and not report.passed)):
        numbers = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        text = f"{item.name}: {report.outcome} in {call.duration:.0f} s; {numbers}"
        item.config.stash.setdefault(ROWS, []).append(text)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what the checks measured."""
    for row in config.stash.get(ROWS, []):
        terminalreporter.line(row)
