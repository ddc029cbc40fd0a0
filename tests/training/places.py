"""Jobs for `run_jobs.py`: their folders, how they are run, and the files that they write."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tasks.process.launch import launch, python_child
from tasks.train import train
from tasks.training.engine.checkpoint import identity
from tasks.training.job import TrainJob
from tests.ranks import SAMPLES
from tests.settings import Settings

LOG = logging.getLogger("test")
Event = dict[str, Any]


def make_job(folder: Path, settings: Settings, base: Path, data: Path, **more: Any) -> TrainJob:
    """Return a job with the empty folders `out` and `checkpoints`; `more` changes its fields."""
    out, checkpoints = folder / "out", folder / "checkpoints"
    out.mkdir(parents=True)
    checkpoints.mkdir()
    job = replace(TrainJob(settings, base, "b" * 64, data, out, checkpoints), **more)
    return replace(job, identity=identity(settings, base_digest="b" * 64, data=data))


def run_jobs(
    folder: Path, jobs: Sequence[TrainJob], nproc: int = 2, *, checks: Path | None = None
) -> list[Event]:
    """Train all jobs in one launch; return their events in order.

    A job that fails on every rank leaves the file `failure` in its output, and the others run.
    `run_jobs.measure_engines` writes to the folder `checks`.
    """
    events: list[Event] = []
    arguments = [job.checkpoints / "job.json" for job in jobs]
    for job, path in zip(jobs, arguments, strict=True):
        job.write(path)
    words = map(str, [nproc, "tests.training.run_jobs", *arguments, *[checks] * bool(checks)])
    sample = any(job.settings.runs_vllm for job in jobs)
    launch(
        python_child("tests.ranks", *words),
        stage="train",
        log=LOG,
        log_path=folder / f"{nproc}-ranks.log",
        env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", SAMPLES: "1" * sample},
        on_event=events.append,
    )
    return events


def run_train(
    folder: Path,
    base: Path,
    data: Path,
    settings: Settings,
    observe: Callable[[Event], None] = lambda event: None,
    **more: Any,
) -> Any:
    """Run the stage "train" as the mechanism does; return its report."""
    (folder / "out").mkdir(parents=True)
    return train(
        folder / "out",
        base=base,
        data=data,
        base_digest="b" * 64,
        settings=settings,
        checkpoints=folder / "checkpoints",
        log=LOG,
        log_path=folder / "train.log",
        on_event=observe,
        **more,
    )


def rank_pids(folder: Path) -> list[int]:
    """Return the processes that run the job of `run_train`, without torchrun and its parents."""
    mark = f"tasks.training\0{(folder / 'checkpoints' / 'job.json').resolve()}"
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if mark in text and "torch.distributed.run" not in text:
            pids.append(int(path.parent.name))
    return sorted(pids)


def at_step(step: int, act: Callable[[], None]) -> Callable[[Event], None]:
    """Return an observer that calls a function once, at the event of a step."""
    done: list[int] = []

    def observe(event: Event) -> None:
        if event["event"] == "step" and event["step"] == step and not done:
            done.append(step)
            act()

    return observe


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def results(job: TrainJob) -> dict[str, Any]:
    """Return what a job wrote to train.json."""
    failure = job.out / "failure"
    assert not failure.exists(), failure.read_text()
    document: dict[str, Any] = read_json(job.out / "train.json")
    return document


def losses(job: TrainJob) -> list[float]:
    return list(results(job)["losses"])


def stitched(folder: Path, shards: Path | None = None) -> dict[str, torch.Tensor]:
    """Join all trained tensors of an artifact by the metadata of its shards alone."""
    from safetensors import safe_open

    parameters = read_json(folder / "partitions.json")["parameters"]
    shapes = {name: parameter["shape"] for name, parameter in parameters.items()}
    full: dict[str, torch.Tensor] = {}
    for path in sorted((shards or folder / "shards").iterdir()):
        with safe_open(path, "pt") as file:
            for name, at in json.loads(file.metadata()["partitions"]).items():
                part = file.get_tensor(name)
                count = torch.Size(shapes[name]).numel()
                whole = full.setdefault(name, torch.full((count,), torch.nan, dtype=part.dtype))
                whole[at["start"] : at["end"]] = part
    assert set(full) == set(shapes)
    return {name: tensor.view(shapes[name]) for name, tensor in full.items()}


def weights(job: TrainJob) -> dict[str, torch.Tensor]:
    return stitched(job.out)


def start_weights(job: TrainJob) -> dict[str, torch.Tensor]:
    """Return the trained tensors before the first step."""
    return stitched(job.out, job.out.parent / "start")


def require_same_weights(first: Path, second: Path, tolerance: float) -> None:
    expected, actual = stitched(first), stitched(second)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def require_same_artifact(expected: Path, other: Path) -> None:
    """Compare two artifacts byte for byte; only `train.json` has durations."""
    before, after = files(expected), files(other)
    assert sorted(after) == sorted(before)
    assert [path for path in before if before[path] != after[path]] in ([], ["train.json"])
    first, second = (read_json(folder / "train.json") for folder in (expected, other))
    for name in ("losses", "evaluations", "scores"):
        assert second[name] == first[name], name
