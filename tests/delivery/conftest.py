"""Checkpoints as other tools leave them, and functions that run deliver like a user."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command, environment, run_in_empty, summary_of

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

    @property
    def codes(self) -> set[str]:
        return {finding["code"] for finding in self.summary["findings"]}


def _arguments(tmp_path: Path, words: tuple[str, ...], engine: str) -> list[str]:
    out = [] if any(word.startswith("out=") for word in words) else [f"out={tmp_path / 'out'}"]
    runs = [f"paths.runs={tmp_path / 'runs'}", f"smoke.engine={engine}"]
    return command("deliver", AS_PEFT, *words, *out, *runs)


@pytest.fixture
def deliver(tmp_path: Path) -> Callable[..., Done]:
    """Run the real command in an empty folder, into `tmp_path / "out"`; check its exit status."""
    cwd = tmp_path / "elsewhere"
    cwd.mkdir()

    def run(*words: str, engine: str = "none", code: int = 0, timeout: float = 280) -> Done:
        argv = _arguments(tmp_path, words, engine)
        done = run_in_empty(cwd, argv, env=one_thread(), timeout=timeout)
        assert done.returncode == code, done.stdout
        return Done(code, done.stdout, summary_of(tmp_path / "runs"))

    return run


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run deliver in this process; check its status, and that a refusal writes nothing."""
    from flows.delivery.run_delivery import main

    def run(*words: str, engine: str = "none", code: int = 0) -> Done:
        before = {path.name for path in tmp_path.iterdir()}
        monkeypatch.setattr(sys, "argv", _arguments(tmp_path, words, engine)[1:])
        status = main()
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert status == code, output
        if code == 2:
            assert {path.name for path in tmp_path.iterdir()} == before
        return Done(status, output, summary_of(tmp_path / "runs"))

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
    from tests.weights.making import make_base

    return make_base(place / "ours", "qwen").path


@pytest.fixture(scope="session")
def base(place: Path, ours: Path) -> Path:
    """The same model without a manifest, like a downloaded one."""
    return foreign(ours, place / "tiny-qwen")


@pytest.fixture(scope="session")
def other(place: Path) -> Path:
    """A model with the same names and shapes and other weights."""
    from tests.weights.making import make_base

    return foreign(make_base(place / "made-other", "qwen", seed=3).path, place / "tiny-qwen-chat")


@pytest.fixture(scope="session")
def trained(base: Path) -> Any:
    """A PEFT model in memory, never to be changed."""
    from tests.weights.making import Spread, trained_model

    return trained_model(base, Spread(), 1)


@pytest.fixture(scope="session")
def adapter(place: Path, trained: Any) -> Path:
    """An adapter folder from `save_pretrained` of a PEFT model."""
    trained.save_pretrained(place / "adapter")
    return place / "adapter"


@pytest.fixture(scope="session")
def merged(base: Path, adapter: Path) -> dict[str, Any]:
    """The merge of `adapter` by peft."""
    from tests.delivery.making import merged_by_peft

    return merged_by_peft(base, adapter)


@pytest.fixture(scope="session")
def shards(place: Path, ours: Path) -> Path:
    """A shards artifact from our training of the same adapter on three ranks."""
    from tasks.pipeline.artifact import open_artifact
    from tests.weights.making import Spread, write_trained

    return write_trained(place / "shards", open_artifact(ours), Spread(world_size=3))
