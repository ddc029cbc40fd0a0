"""The order of things within one rank."""

from __future__ import annotations

import time
from typing import Any

from tasks.bf16_linear import use_fp32_where_faster
from tasks.errors import TrainingError
from tasks.events import emit
from tasks.training.data import load_split
from tasks.training.engine import Ranks, start_engine
from tasks.training.job import TrainJob
from tasks.training.loop import Trainer
from tasks.training.model import load_model, load_tokenizer
from tasks.training.objectives import objective
from tasks.training.outputs import write_common
from tasks.training.partitions import not_finite, own_shares, write_shares
from tasks.training.probe import choose_probes, fingerprint
from tasks.training.zero_config import deepspeed_config


def run(job: TrainJob, started: float) -> None:
    """Train, and write this rank's part of the `shards` artifact.

    Args:
        job: what to do.
        started: `time.time()` at which this process began, for the event "ready".
    """
    use_fp32_where_faster()
    ranks = Ranks()
    settings = job.settings
    chosen = objective(settings.objective)
    config = deepspeed_config(settings, ranks.world_size)
    tokenizer = load_tokenizer(job)
    train = load_split(job, "train", tokenizer, ranks)
    heldout = load_split(job, "heldout", tokenizer, ranks)
    engine = start_engine(load_model(job, ranks, config), config)
    if ranks.first:
        emit("ready", startup_s=time.time() - started, device=str(ranks.device))
    trainer = Trainer(engine, ranks, job, chosen, int(tokenizer.pad_token_id))
    before = trainer.evaluate(heldout, when="before")
    begin = time.perf_counter()
    records = trainer.train(train)
    seconds = time.perf_counter() - begin
    after = trainer.evaluate(heldout, when="after")
    _write_own(engine.module, job, ranks)
    print_of_engine = fingerprint(engine, choose_probes(heldout, settings.probes), ranks.device)
    if ranks.first:
        metrics = {
            "steps": float(len(records)),
            "loss": records[-1]["loss"],
            "heldout_loss_before": before,
            "heldout_loss_after": after,
            "train_s": seconds,
        }
        write_common(
            job,
            model=engine.module,
            tokenizer=tokenizer,
            metrics=metrics,
            records=records,
            fingerprint=print_of_engine,
        )
        emit("done", **metrics)
    ranks.barrier()
    ranks.leave()


def _write_own(model: Any, job: TrainJob, ranks: Ranks) -> None:
    shares = own_shares(model, rank=ranks.rank, world_size=ranks.world_size)
    broken = not_finite(shares)
    if broken:
        raise TrainingError(
            f"after the last step {len(broken)} trained tensors are not finite, "
            f"first {broken[0]} on rank {ranks.rank}",
            details=broken[:20],
        )
    write_shares(shares, job.out / "shards", rank=ranks.rank, world_size=ranks.world_size)
