"""A killed or failed run leaves nothing wrong visible, and the next one ends in the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin, open_artifact, publish, staging, sweep, verify
from tasks.weights import write as writing
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.tensors import Tensors
from tasks.weights.write import lay_out, write
from tasks.weights.written import Executed
from tests.weights.plans import make_inputs, make_plan

ROOT = Path(__file__).resolve().parents[2]
ORIGIN = Origin("weights", "test", "made")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _publish(inputs: dict[str, Tensors], final: Path) -> Executed:
    with staging(final) as work:
        done = write(make_plan(), inputs, work, workers=1)
        publish(work, final, ORIGIN, done.hashes)
    return done


def _bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    made = tmp_path_factory.mktemp("reference") / "made"
    _publish(inputs, made)
    return _bytes(made)


def test_a_write_that_fails_midway_leaves_nothing(inputs, reference, tmp_path, monkeypatch) -> None:
    real, calls = os.pwrite, []

    def failing(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) > 8:
            raise OSError(5, os.strerror(5))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(ArtifactError) as caught:
            _publish(inputs, tmp_path / "made")
        assert "paths.runs=" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    _publish(inputs, tmp_path / "made")
    assert _bytes(tmp_path / "made") == reference
    assert verify(open_artifact(tmp_path / "made")) == []


def test_an_input_that_was_linked_is_never_written_to(inputs, tmp_path) -> None:
    """The staging folder still contains a link to an input, and this run has to write that file."""
    folder = shutil.copytree(inputs["base"]["wide"].extents[0].path.parent, tmp_path / "folder")
    victim = folder / "model-00001-of-00002.safetensors"
    before = victim.read_bytes()
    out = tmp_path / "out"
    out.mkdir()
    sources = {**inputs, "base": read_checkpoint(folder)}
    files = [each.name for each in lay_out(make_plan(), sources)]
    os.link(victim, out / files[0])
    write(make_plan(), sources, out)
    assert victim.read_bytes() == before
    assert (out / files[0]).stat().st_nlink == 1


def test_too_little_space_and_an_interruption_leave_nothing(inputs, tmp_path, monkeypatch) -> None:
    class Usage:
        free = 1000

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing.shutil, "disk_usage", lambda _: Usage)
        with pytest.raises(ArtifactError, match="free"):
            _publish(inputs, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _publish(inputs, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, random, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from tasks.pipeline.artifact import Origin, publish, staging
from tasks.weights.write import write
from tasks.weights.write import lay_out
from tasks.weights.files.reader import read_checkpoint
from tests.weights.plans import make_plan

root, rounds = Path(sys.argv[2]), int(sys.argv[3])
inputs = {"base": read_checkpoint(root / "base"),
          "adapter": read_checkpoint(root / "adapter", "adapter_model")}
real, chance, kills = os.pwrite, random.Random(7), 0

def slow(*arguments):
    time.sleep(0.001)
    return real(*arguments)

def make(final, pace):
    os.pwrite = pace
    with staging(final) as work:
        done = write(make_plan(), inputs, work, workers=2)
        publish(work, final, Origin("weights", "test", "made"), done.hashes)

def forked(final):
    child = os.fork()
    if not child:
        try:
            make(final, slow)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child

make(root / "store" / "reference", real)
started = time.monotonic()
os.waitpid(forked(root / "store" / "timed"), 0)
span = time.monotonic() - started
for number in range(rounds):
    final = root / "store" / f"a{number}"
    for attempt in range(4):
        child = forked(final)
        time.sleep(chance.uniform(0, span))
        os.kill(child, 9)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
    child = forked(final)
    _, status = os.waitpid(child, 0)
    if not final.exists() or status:
        sys.exit(f"round {number}: status {status}")
print(kills)
"""


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(inputs, tmp_path: Path, rounds: int) -> None:
    make_inputs(tmp_path)
    command = [sys.executable, "-c", KILLED, str(ROOT), str(tmp_path), str(rounds)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= rounds
    store = tmp_path / "store"
    wanted = _bytes(store / "reference")
    for number in range(rounds):
        final = store / f"a{number}"
        assert verify(open_artifact(final)) == []
        assert _bytes(final) == wanted
    sweep(tmp_path)
    assert [path.name for path in store.iterdir() if path.name.startswith(".")] == []
