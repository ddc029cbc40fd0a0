"""The program as a user runs it: the literal command, from another working directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command, environment, run_in_empty, summary_of


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


@pytest.fixture(scope="session")
def rlhf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run `python /elsewhere/flows/rlhf.py OVERRIDES paths.runs=RUNS` in an empty directory."""
    cwd = tmp_path_factory.mktemp("elsewhere")

    def run(runs: Path, *overrides: str, timeout: float = 1140) -> Run:
        argv = command("rlhf", *overrides, f"paths.runs={runs}")
        done = run_in_empty(cwd, argv, env=environment(), timeout=timeout)
        return Run(done.returncode, done.stdout, runs, summary_of(runs))

    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the main jobs, so that they share the toy base and its data."""
    return tmp_path_factory.mktemp("plumbline") / "runs"


@pytest.fixture(scope="session")
def qlora(rlhf: Callable[..., Run], runs: Path) -> Run:
    """`+exp=sft_qlora` from an empty folder."""
    return rlhf(runs, "+exp=sft_qlora")
