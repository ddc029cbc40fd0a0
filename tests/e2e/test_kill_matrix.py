"""Everything is killed at every moment; the same command then ends with the same bytes.

One chain, the cheapest. A run that is killed is started again and killed at the next moment, so the
last one goes on from what all of them have left.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import command, environment, summary_of
from tests.e2e.conftest import Run, living
from tests.tracking.mlflow_process import MlflowProcess
from tests.training.places import files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
MADE = {
    "prepare_data": "dataset", "prepare_base": "base", "train": "shards", "gather": "adapter",
    "merge": "weights", "convert": "served", "smoke_eval": "report",
}  # fmt: skip
"""Stages in their order, and the kind of artifact of each."""
STEPS = ("+exp=sft_qlora", "train.max_steps=12", "train.save_steps=4", "smoke.min_stop_rate=0")
CHAIN = (*STEPS, "smoke.eval_samples=8")
PROGRAMS = {
    "rank": "tasks.training",
    "vllm": "tasks.serving.vllm.child",
    "scorer": "tasks.serving.reference.child",
    "prefect": "prefect.server",
}
"""Words in the command line of each process."""
LIMIT_S = 600.0


def served_files(summary: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the served files by name, without those that name a run."""
    served = files(Path(summary["served"]))
    del served["manifest.json"]  # it has the digests of inputs, which have times
    del served["README.md"]  # it names the command, and the engine of the smoke test
    return served


class Chain:
    """The chain in a folder of its own."""

    def __init__(self, runs: Path, rlhf: Callable[..., Run], engine: str = "transformers") -> None:
        self.runs, self._rlhf = runs, rlhf
        self._settings = (*CHAIN, f"smoke.engine={engine}")

    def finish(self, *more: str, code: int = 0) -> dict[str, bytes]:
        """Run the command to its end. Returns the served files."""
        done = self._rlhf(self.runs, *self._settings, *more)
        assert done.code == code, done.output
        return served_files(done.summary)

    @contextmanager
    def started(self, *more: str) -> Iterator[psutil.Process]:
        """Start the command; leave the block when it has ended."""
        argv = command("rlhf", *self._settings, *more, f"paths.runs={self.runs}")
        output = self.runs.parent / "killed.txt"
        with (
            output.open("w") as file,
            subprocess.Popen(argv, env=environment(), stdout=file, stderr=file) as process,
        ):
            yield psutil.Process(process.pid)
            process.wait(LIMIT_S)
        wait_for(lambda: not living(self.runs), None, "children live on")

    def begun(self, stage: str) -> bool:
        return bool(list((self.runs / "artifacts" / MADE[stage]).glob(".*.tmp")))

    def ended(self, stage: str) -> bool:
        return bool(list((self.runs / "artifacts" / MADE[stage]).glob("[!.]*")))

    def inodes(self) -> set[int]:
        """Return the inodes of the artifacts: one that is made again has another."""
        return {path.stat().st_ino for path in (self.runs / "artifacts").glob("*/[!.]*")}

    def saved(self) -> bool:
        return bool(list((self.runs / "checkpoints").glob("*/step-*/state.json")))


def wait_for(condition: Callable[[], bool], flow: psutil.Process | None, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        ended = flow is not None and not (
            flow.is_running() and flow.status() != psutil.STATUS_ZOMBIE
        )
        assert not ended, f"the run has ended before {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def members(flow: psutil.Process, words: str) -> list[psutil.Process]:
    """Return the descendants that a command line names, without supervisors and torchrun."""
    named = []
    for process in flow.children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if words in line and "supervise.py" not in line and "torch.distributed" not in line:
            named.append(process)
    return named


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, rlhf: Callable[..., Run]) -> Chain:
    return Chain(tmp_path_factory.mktemp("matrix") / "runs", rlhf)


@pytest.fixture(scope="module")
def undisturbed(chain: Chain) -> dict[str, bytes]:
    return chain.finish()


@pytest.mark.parametrize("target", ["flow", "everything"])
def test_a_run_is_killed_within_and_after_every_stage(
    chain: Chain, undisturbed: dict[str, bytes], target: str
) -> None:
    shutil.rmtree(chain.runs / "artifacts")
    for stage in MADE:
        # A short stage may begin and end between two looks.
        moments = [
            lambda s=stage: chain.begun(s) or chain.ended(s),
            lambda s=stage: chain.ended(s),
        ]
        if stage == "train":
            moments.insert(1, chain.saved)
        for moment in moments:
            with chain.started() as flow:
                wait_for(moment, flow, f"{stage} of {target}")
                family = flow.children(recursive=True) if target == "everything" else []
                kill([flow, *family])
    assert chain.finish() == undisturbed
    assert not list((chain.runs / "artifacts").glob("*/.*.tmp"))


@pytest.mark.parametrize(
    ("target", "stage"),
    [("rank", "train"), ("scorer", "gather"), ("scorer", "merge"), ("vllm", "smoke_eval")],
)
def test_a_child_is_killed(
    chain: Chain, undisturbed: dict[str, bytes], rlhf: Callable[..., Run], target: str, stage: str
) -> None:
    """The run fails, and the same command goes on."""
    served = Chain(chain.runs, rlhf, engine="vllm")
    for kind in list(MADE.values())[list(MADE).index(stage) :]:
        shutil.rmtree(chain.runs / "artifacts" / kind, ignore_errors=True)
    with served.started() as flow:
        wait_for(
            lambda: served.begun(stage) and bool(members(flow, PROGRAMS[target])), flow, target
        )
        if target == "rank":
            wait_for(served.saved, flow, "the first checkpoint")
        kill(members(flow, PROGRAMS[target])[:1])
    summary = summary_of(chain.runs)
    assert summary["status"] == "failed"
    assert stage in summary["error"] or "score" in summary["error"]
    assert served.finish() == undisturbed


@pytest.mark.parametrize("target", ["prefect", "mlflow"])
def test_a_server_is_killed_within_every_stage(
    chain: Chain, undisturbed: dict[str, bytes], target: str, tmp_path: Path
) -> None:
    """The run goes on to its end."""
    mlflow = MlflowProcess(tmp_path)
    uri = [f"tracking.uri={mlflow.uri}"] if target == "mlflow" else []
    try:
        for stage in MADE:
            if target == "mlflow":
                mlflow.start()
            before = chain.inodes()
            with chain.started(*uri, f"force=[{stage}]") as flow:
                wait_for(
                    lambda s=stage, b=before: chain.begun(s) or chain.inodes() != b, flow, stage
                )
                if target == "mlflow":
                    mlflow.kill()
                else:
                    kill(members(flow, PROGRAMS[target]))
            summary = summary_of(chain.runs)
            assert summary["status"] == "completed", summary
            assert bool(summary["tracking"]) == (target == "mlflow"), stage
            assert served_files(summary) == undisturbed
        if target == "mlflow":
            mlflow.start()
        assert chain.finish(*uri) == undisturbed
    finally:
        mlflow.kill()
