"""The program as a user runs it: the literal command, from another working directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flows" / "rlhf.py"


@dataclass(frozen=True)
class Run:
    """A finished command and what it left. `summary` is its own: `latest` moves on."""

    code: int
    output: str
    runs: Path
    summary: dict[str, Any]

    def stage(self, name: str) -> dict[str, Any]:
        (entry,) = [s for s in self.summary["stages"] if s["name"] == name]
        return entry


def command(runs: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(PROGRAM), *overrides, f"paths.runs={runs}"]


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    return inherited | {"COLUMNS": "160"}


@pytest.fixture(scope="session")
def rlhf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run `python /elsewhere/flows/rlhf.py OVERRIDES paths.runs=RUNS` in an empty directory."""
    cwd = tmp_path_factory.mktemp("elsewhere")

    def run(runs: Path, *overrides: str, timeout: float = 570) -> Run:
        done = subprocess.run(
            command(runs, *overrides), cwd=cwd, env=environment(), timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert not list(cwd.iterdir()), "the command wrote into the user's directory"
        latest = runs / "latest" / "summary.json"
        summary = json.loads(latest.read_text()) if latest.is_file() else {}
        return Run(done.returncode, done.stdout, runs, summary)

    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the main jobs, so that they share the toy base and its data."""
    return tmp_path_factory.mktemp("plumbline") / "runs"


@pytest.fixture(scope="session")
def qlora(rlhf: Callable[..., Run], runs: Path) -> Run:
    """`+exp=sft_qlora` from an empty folder."""
    return rlhf(runs, "+exp=sft_qlora")
