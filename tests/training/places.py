"""Jobs for `run_jobs.py`: their folders, how they are run, and their results."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tasks.process.launch import launch, python_child
from tasks.train import build_ops
from tasks.training.engine.partitions import SavedPartitions
from tasks.training.job import TrainJob
from tasks.training.resume import identity
from tests.settings import Settings

LOG = logging.getLogger("test")


@dataclass(frozen=True)
class Place:
    """Folders, base and data of the jobs of one session."""

    root: Path
    base: Path
    dataset: Path

    def job(self, name: str, settings: Settings, **more: Any) -> TrainJob:
        out = self.root / name / "out"
        out.mkdir(parents=True)
        checkpoints = self.root / name / "checkpoints"
        checkpoints.mkdir()
        return TrainJob(
            settings,
            self.base,
            "b" * 64,
            self.dataset,
            out,
            checkpoints,
            identity=identity(settings, base_digest="b" * 64, data=self.dataset),
            **more,
        )

    def run(
        self, jobs: list[TrainJob], nproc: int = 2, *, program: str = "run_jobs"
    ) -> list[dict[str, Any]]:
        """Train all jobs by a program below this folder; return their events in order."""
        events: list[dict[str, Any]] = []
        paths = [job.checkpoints / "job.json" for job in jobs]
        for job, path in zip(jobs, paths, strict=True):
            job.write(path)
        run = partial(launch, stage="train", log=LOG, log_path=self.root / f"{nproc}-ranks.log")
        for job in jobs:
            if job.settings.zero.offload_optimizer == "cpu":
                build_ops(job.settings, run)
                break  # one library for all of them
        how = ["--standalone", "--nproc-per-node", str(nproc), "-m", f"tests.training.{program}"]
        run(
            python_child("torch.distributed.run", *how, *map(str, paths)),
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            on_event=events.append,
        )
        return events


def said(job: TrainJob) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((job.out / "train.json").read_text())
    return document


def weights(job: TrainJob) -> Mapping[str, torch.Tensor]:
    names = json.loads((job.out / "partitions.json").read_text())["parameters"]
    saved = SavedPartitions(job.out / "shards")
    return {name: saved.whole(name) for name in names}


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
