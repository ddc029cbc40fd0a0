"""Whole online runs on real ranks: settings, start, results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tasks.training.job import Evaluate, Peft, TrainJob, Zero
from tests.commands import run_ranks
from tests.settings import Batch, Launch, Loop, Optim, Settings

ONLINE = {
    "rl": {
        **vars(Loop()),
        "rollout_batch_size": 8,
        "num_generations": 2,
        "iterations": 4,
        "eval_prompts": 4,
        "ppo_epochs": 2,
        "kl_coef": 0.05,
        "mismatch_limit": 10.0,
    },
    "rollout": {
        "engine": "transformers",
        "max_new_tokens": 6,
        "max_prompt_len": 40,
        "offload_trainer": False,
    },
    "reward": {},
}
SETTINGS = Settings(
    objective="ppo",
    dtype="float32",
    save_steps=2,
    max_ckpt_num=0,
    probes=4,
    peft=Peft(kind="lora", rank=4, alpha=8),
    zero=Zero(stage=2),
    optim=Optim(lr=1e-2, scheduler="constant"),
    batch=Batch(micro_batch_size=4, global_batch_size=8, max_len=64),
    launch=Launch(nproc=2, threads=1),
    evaluate=Evaluate(best_metric="reward"),
)


def job_of(settings: Settings, base: Path, data: Path, out: Path, **more: object) -> TrainJob:
    out.mkdir(parents=True)
    checkpoints = out / "checkpoints"
    checkpoints.mkdir()
    return TrainJob(settings, base, "digest", data, out, checkpoints, **more)


def settings_with(
    data: Path, *, rl: dict[str, object] | None = None, **changed: object
) -> Settings:
    online = json.loads(json.dumps(ONLINE))
    online["rl"] |= rl or {}
    online["reward"]["function"] = f"{data / 'reward.py'}:score"
    return replace(SETTINGS, online=online, **changed)


def settings_in_game(data: Path, **changed: Any) -> Settings:
    """Return settings of a run with the environment of `data`: episodes of 2 to 4 turns.

    Trainer and engine read the same context, observations included, or the run fails.
    """
    rl = {"environment": f"{data / 'game.py'}:Game", "max_turns": 4, "mismatch_limit": 1e-3}
    settings = settings_with(data, rl={**rl, "iterations": 2, **changed.pop("rl", {})}, **changed)
    online = json.loads(json.dumps(settings.online))
    online["rollout"] |= {"max_prompt_len": 30, "max_new_tokens": 96}
    online["reward"] = {}
    return replace(settings, online=online)


def run(folder: Path, jobs: list[TrainJob], *, ranks: int = 2) -> list[dict[str, Any]]:
    """Run jobs one after another on the same ranks; return the metrics of their iterations."""
    return started("tests.rl.online_program", folder, *map(_written, jobs), ranks=ranks)


def run_to(point: str, folder: Path, job: TrainJob, *, rank: int) -> None:
    """Run a job until a rank is killed, see `killed_program.py`."""
    started("tests.rl.killed_program", folder, _written(job), point, str(rank))


def _written(job: TrainJob) -> str:
    path = job.out / "job.json"
    job.write(path)
    return str(path)


def started(module: str, folder: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a module in ranks; return its "step" events. Raises StageProcessError."""
    events: list[dict[str, Any]] = []
    log_path = folder / f"log-{ranks}"
    run_ranks(module, *arguments, log_path=log_path, ranks=ranks, on_event=events.append)
    return [event for event in events if event["event"] == "step"]


def stitched(out: Path) -> dict[str, torch.Tensor]:
    """Return all trained tensors, by the metadata of the shards alone."""
    shapes = json.loads((out / "partitions.json").read_text())["parameters"]
    full: dict[str, torch.Tensor] = {}
    for path in sorted((out / "shards").iterdir()):
        with safe_open(path, "pt") as file:
            for name, at in json.loads(file.metadata()["partitions"]).items():
                count = math.prod(at["shape"])
                flat = full.setdefault(name, torch.full((count,), torch.nan))
                flat[at["start"] : at["end"]] = file.get_tensor(name).float()
    assert set(full) == set(shapes)
    return full
