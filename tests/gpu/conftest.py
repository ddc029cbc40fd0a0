"""Packages and GPUs of the machine, reasons to skip a check, and the table at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.suite import Check, Setting, missing

ROWS = pytest.StashKey[list[str]]()
MACHINE = """
import json, torch
there = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if there else []
free = [torch.cuda.mem_get_info(i)[0] >> 30 for i in range(len(names))]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "names": names,
                  "free": free}))
"""


@dataclass(frozen=True)
class Machine:
    """The GPUs that torch can use here.

    Attributes:
        text: one line about them, or why there are none.
        free: free memory of each, GiB.
    """

    text: str
    free: tuple[int, ...] = ()

    @classmethod
    def ask(cls) -> Machine:
        """Ask torch, in a child: this process never imports it."""
        done = subprocess.run(
            [sys.executable, "-c", MACHINE], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return cls((done.stderr.strip().splitlines() or ["torch does not start"])[-1])
        reply = json.loads(done.stdout.splitlines()[-1])
        if not reply["names"]:
            return cls(f"torch {reply['torch']} finds no CUDA GPU")
        text = f"torch {reply['torch']}, CUDA {reply['cuda']}, {', '.join(reply['names'])}"
        return cls(text, tuple(reply["free"]))

    def lacks(self, check: Check) -> str:
        """Why the check cannot run here; empty if it can."""
        if not self.free:
            return self.text
        if len(self.free) < check.gpus:
            return f"{len(self.free)} of {check.gpus} GPUs"
        if min(self.free[: check.gpus]) < check.gib:
            return f"{check.gib} GiB of GPU memory needed, {min(self.free)} GiB free"
        absent = missing(check)
        return f"not installed: {', '.join(absent)}" if absent else ""


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This machine."""
    return Machine.ask()


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all checks of a session share: models are made once."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture
def setting(machine: Machine, place: Path, check: Check) -> Setting:
    """The check's setting on this machine; skips what cannot run."""
    lacks = machine.lacks(check)
    if lacks:
        pytest.skip(lacks)
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
