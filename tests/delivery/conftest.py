"""Checkpoints as other tools leave them, and functions that run deliver like a user."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.commands.deliver import main
from tests.commands import command, environment, run_in_empty, summary_of
from tests.weights.making import Spread, make_base, trained_model, write_trained

AS_PEFT = "merge.rounding=nearest"
"""Rounding of the deliveries in these tests, which compare bytes with peft's; a test's own wins."""


def one_thread() -> dict[str, str]:
    return environment(OMP_NUM_THREADS="1")


@dataclass(frozen=True)
class Done:
    """A finished command with its output."""

    code: int
    output: str
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> list[str]:
        return [stage["name"] for stage in self.summary["stages"]]


@pytest.fixture
def deliver(tmp_path: Path) -> Callable[..., Done]:
    """Run `python /elsewhere/flows/deliver.py ARGUMENTS paths.runs=RUNS` in an empty directory."""
    cwd, runs = tmp_path / "elsewhere", tmp_path / "runs"
    cwd.mkdir()

    def run(*arguments: str, engine: str = "none", timeout: float = 280) -> Done:
        argv = command(
            "deliver", AS_PEFT, *arguments, f"paths.runs={runs}", f"smoke.engine={engine}"
        )
        done = run_in_empty(cwd, argv, env=one_thread(), timeout=timeout)
        return Done(done.returncode, done.stdout, summary_of(runs))

    return run


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run deliver in this process; a refusal or a plan needs no process of its own."""
    runs = tmp_path / "runs"

    def run(*arguments: str, engine: str = "none") -> Done:
        _, *argv = command(
            "deliver", AS_PEFT, *arguments, f"paths.runs={runs}", f"smoke.engine={engine}"
        )
        monkeypatch.setattr(sys, "argv", argv)
        code = main()
        captured = capsys.readouterr()
        return Done(code, captured.out + captured.err, summary_of(runs))

    return run


@pytest.fixture(params=["here", pytest.param("deliver", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest) -> Callable[..., Done]:
    """Run deliver in this process, which is faster; in the long suite run the real command."""
    run: Callable[..., Done] = request.getfixturevalue(request.param)
    return run


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deliver")


def foreign(artifact: Path, folder: Path) -> Path:
    """Return a copy of a folder without our manifest, like a downloaded model."""
    shutil.copytree(artifact, folder)
    (folder / "manifest.json").unlink()
    return folder


@pytest.fixture(scope="session")
def ours(place: Path) -> Path:
    """A base artifact."""
    return make_base(place / "ours", "qwen").path


@pytest.fixture(scope="session")
def base(place: Path, ours: Path) -> Path:
    """The same model without a manifest, like a downloaded one."""
    return foreign(ours, place / "tiny-qwen")


@pytest.fixture(scope="session")
def other(place: Path) -> Path:
    """A model with the same names and shapes and other weights."""
    return foreign(make_base(place / "made-other", "qwen", seed=3).path, place / "tiny-qwen-chat")


@pytest.fixture(scope="session")
def adapter(place: Path, base: Path) -> Path:
    """An adapter folder from `save_pretrained` of a PEFT model."""
    folder = place / "adapter"
    trained_model(base, Spread(), 1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shards(place: Path, ours: Path) -> Path:
    """A shards artifact from our training of an adapter."""
    from tasks.pipeline.artifact import open_artifact

    return write_trained(place / "shards", open_artifact(ours), Spread(world_size=3))


@pytest.fixture(scope="session")
def full_shards(place: Path, ours: Path) -> Path:
    """A shards artifact from our full fine-tuning."""
    from tasks.pipeline.artifact import open_artifact

    return write_trained(place / "full", open_artifact(ours), Spread(world_size=2, full=True))
