"""Checkpoints written beside training: copies, errors, ranks that die, a run that is cancelled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch, python_child
from tasks.train import SAVE_GRACE_S
from tasks.training.engine.async_writer import Writer, on_host
from tasks.training.engine.checkpoint import complete, differences, last_good, work_folder
from tasks.training.engine.saving import Saver
from tasks.training.job import TrainJob, Zero
from tests.settings import Batch, Optim, Settings
from tests.training.places import LOG, Place, files, said

SETTINGS = Settings(
    zero=Zero(2),
    optim=Optim(lr=5e-3, warmup_ratio=0.2),
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=6, max_len=64),
    save_steps=2,
    probes=3,
)
KILLS = {"rank": ("write", "1"), "every-rank": ("write", "all"), "rename": ("publish", "0")}


class TestCopies:
    def test_they_are_equal_and_change_with_nothing(self) -> None:
        weight = torch.nn.Parameter(torch.arange(6.0))
        state: dict[str, Any] = {
            "module": OrderedDict(weight=weight, view=weight[2:4]),
            "groups": [{"step": torch.tensor(3.0), "betas": (0.9, 0.999)}],
            "shape": weight.shape,
            "losses": [1.0],
        }
        copied = on_host(state)
        with torch.no_grad():
            weight.zero_()
        state["losses"].append(2.0)
        state["groups"][0]["step"] += 1
        assert type(copied["module"]) is OrderedDict
        assert type(copied["shape"]) is torch.Size
        assert not copied["module"]["weight"].requires_grad
        assert copied["module"]["weight"].tolist() == [0, 1, 2, 3, 4, 5]
        assert copied["module"]["view"].tolist() == [2, 3]
        assert copied["groups"] == [{"step": torch.tensor(3.0), "betas": (0.9, 0.999)}]
        assert copied["losses"] == [1.0]

    def test_a_view_is_saved_without_the_rest_of_its_storage(self, tmp_path: Path) -> None:
        torch.save(on_host(torch.zeros(1 << 20)[:8]), tmp_path / "view.pt")
        assert (tmp_path / "view.pt").stat().st_size < 10_000


class TestWriter:
    def test_an_error_is_raised_once_by_the_next_check(self) -> None:
        writer, go = Writer(), threading.Event()

        def fail() -> None:
            go.wait()
            raise OSError(28, "No space left on device")

        writer.start(fail)
        writer.check()  # it is still writing
        go.set()
        writer.join()
        with pytest.raises(OSError, match="No space left"):
            writer.wait()
        writer.wait()
        writer.start(lambda: None)
        writer.wait()

    def test_an_error_is_raised_by_the_next_save_at_the_latest(self) -> None:
        writer = Writer()
        writer.start(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.wait()  # as `Saver.save` does first

    def test_sigterm_has_its_usual_effect_only_after_the_write(self, tmp_path: Path) -> None:
        program = f"""
import os, pathlib, signal, time
from tasks.training.engine.async_writer import Writer
def write():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    pathlib.Path({str(tmp_path / "done")!r}).touch()
writer = Writer()
writer.start(write)
time.sleep(30)
"""
        root = Path(__file__).parents[3]
        ended = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False)
        assert ended.returncode == -signal.SIGTERM
        assert (tmp_path / "done").exists()

    def test_the_handler_is_there_only_during_a_write(self) -> None:
        usual, writer = signal.getsignal(signal.SIGTERM), Writer()
        go = threading.Event()
        writer.start(go.wait)
        assert signal.getsignal(signal.SIGTERM) != usual
        go.set()
        writer.wait()
        assert signal.getsignal(signal.SIGTERM) == usual


class Alone:
    """The rank of a process without process group."""

    def for_thread(self) -> Alone:
        return self


class TestSaver:
    @pytest.fixture
    def saver(self, tmp_path: Path) -> Saver:
        job = TrainJob(SETTINGS, *([tmp_path] * 5), async_save=True)  # type: ignore[arg-type]
        return Saver(None, job, Alone())  # type: ignore[arg-type]

    @staticmethod
    def fail() -> None:
        raise OSError(28, "No space left on device")

    def test_the_end_of_a_run_raises_the_error_of_its_last_checkpoint(self, saver: Saver) -> None:
        with pytest.raises(OSError, match="No space left"), saver:
            saver._writer.start(self.fail)

    def test_the_error_that_ends_a_run_does_not_hide_that_of_a_checkpoint(
        self, saver: Saver, caplog: pytest.LogCaptureFixture
    ) -> None:
        def train() -> None:
            saver._writer.start(self.fail)
            raise ValueError("the loss is NaN")

        with pytest.raises(ValueError, match="the loss is NaN"), saver:
            train()
        assert "No space left on device" in caplog.text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, base: Path, dataset: Path) -> Place:
    return Place(tmp_path_factory.mktemp("async"), base, dataset)


def run(
    place: Place, point: str, rank: str, jobs: list[TrainJob], observe: Callable[[Any], None]
) -> None:
    """Train jobs with a fault, as `tasks/train.py` does."""
    paths = [job.checkpoints / "job.json" for job in jobs]
    for job, path in zip(jobs, paths, strict=True):
        job.write(path)
    how = ["--standalone", "--nproc-per-node", "2", "-m", "tests.training.engine.async_program"]
    launch(
        python_child("torch.distributed.run", *how, point, rank, *map(str, paths)),
        stage="train",
        log=LOG,
        log_path=place.root / "ranks.log",
        env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        on_event=observe,
        grace_s=SAVE_GRACE_S,
    )


@pytest.fixture(scope="module")
def killed(place: Place) -> dict[str, TrainJob]:
    """Jobs of which ranks were killed in the second checkpoint, that of step 4."""
    jobs = {}
    for name, (point, rank) in KILLS.items():
        jobs[name] = place.job(f"killed-{name}", SETTINGS, async_save=True)
        with pytest.raises(StageProcessError):
            run(place, point, rank, [jobs[name]], lambda _: None)
    return jobs


@pytest.fixture(scope="module")
def resumed(place: Place, killed: dict[str, TrainJob]) -> dict[str, TrainJob]:
    """The same jobs after a second start, and a whole one that writes as usual."""
    jobs = {"whole": place.job("whole", SETTINGS)}
    for name, job in killed.items():
        again = place.job(f"again-{name}", SETTINGS, async_save=True)
        jobs[name] = replace(again, resume=last_good(job.checkpoints))
    run(place, "none", "all", list(jobs.values()), lambda _: None)
    return jobs


@pytest.mark.slow
class TestFaults:
    @pytest.mark.parametrize("name", KILLS)
    def test_the_checkpoint_before_is_the_last_good_one(self, name, killed) -> None:
        (last,) = complete(killed[name].checkpoints)
        assert last.name == "step-00000002"
        assert differences(last) == []
        assert work_folder(killed[name].checkpoints, 4).is_dir()

    @pytest.mark.parametrize("name", KILLS)
    def test_a_resumed_run_ends_with_the_same_bytes(self, name, resumed) -> None:
        expected, written = files(resumed["whole"].out), files(resumed[name].out)
        assert said(resumed[name])["losses"] == said(resumed["whole"])["losses"]
        assert [path for path in expected if expected[path] != written.get(path)] == ["train.json"]

    def test_the_end_of_a_run_waits_for_its_last_checkpoint(self, resumed) -> None:
        job = resumed["rank"]
        assert [path.name for path in complete(job.checkpoints)] == ["step-00000004"]
        assert not list(job.checkpoints.glob(".step-*"))

    @pytest.mark.parametrize("rank", ["0", "1"])
    def test_a_cancelled_run_completes_the_checkpoint(self, rank: str, place: Place) -> None:
        """The run is cancelled while one rank writes, and the other waits for it."""

        class CancelledError(Exception):
            pass

        def cancel(event: dict[str, Any]) -> None:
            if event["event"] == "writing":
                raise CancelledError

        batch = replace(SETTINGS.batch, max_steps=2000)
        job = place.job(f"cancelled-{rank}", replace(SETTINGS, batch=batch), async_save=True)
        with pytest.raises(CancelledError):
            run(place, "slow", rank, [job], cancel)
        newest = last_good(job.checkpoints)
        assert newest is not None
        assert newest.name == "step-00000004"
        assert differences(newest) == []
        assert not _alive(job)


def _alive(job: TrainJob) -> list[str]:
    mark = str(job.checkpoints / "job.json")
    ended = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False)
    return [pid for pid in ended.stdout.split() if int(pid) != os.getpid()]
