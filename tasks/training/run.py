"""One rank of a training run, from loading the data to writing its partitions."""

from __future__ import annotations

import time

from tasks.core.events import emit
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.saving import restore
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.loop import Trainer
from tasks.training.losses import objective
from tasks.training.model.build import load_model, load_tokenizer
from tasks.training.model.families import router_coefficient
from tasks.training.model.packed_model import model_of, require_same, restore_attention
from tasks.training.model.probe import (
    choose_probes,
    choose_scored,
    fingerprint_of,
    score_print,
)
from tasks.training.outputs import finish, write_model, write_shards
from tasks.training.passes import Passes, heldout_scores, with_reference
from tasks.training.tokens.data import load_split
from tasks.training.tokens.rows import trial_row


def train_with(ranks: Ranks, job: TrainJob, started: float) -> None:
    """Train, and write this rank's part of the `shards` artifact."""
    settings = job.settings
    chosen = objective(settings.objective, vars(settings.loss))
    how = {"gpu": ranks.gpu, "universal": job.universal is not None}
    config = deepspeed_config(settings, ranks.world_size, **how)
    tokenizer = load_tokenizer(job)
    train, heldout = (
        load_split(job, split, roles=chosen.roles, tokenizer=tokenizer, ranks=ranks)
        for split in ("train", "heldout")
    )
    model = load_model(job, ranks, config, tokenizer=tokenizer, head=chosen.head)
    engine = start_engine(model, config, settings.optim)
    progress = restore(engine, job)  # ZeRO-3 loads only into an engine not yet used
    require_same(engine, trial_row(heldout).to(ranks.device))
    router = router_coefficient(
        model_of(engine.module).config.to_dict(), settings.router_aux_loss_coef
    )
    passes = Passes(engine, ranks, chosen, router)
    # Under ZeRO-3 a reference pass between two others would undo DeepSpeed's prefetching.
    if chosen.needs_reference and (settings.peft.kind == "none" or settings.zero.stage == 3):
        train, heldout = (
            with_reference(examples, split, passes=passes, job=job, begun=progress.step)
            for examples, split in ((train, "train"), (heldout, "heldout"))
        )
    if ranks.first:
        write_model(job, model=engine.module, tokenizer=tokenizer)
        emit("ready", startup_s=time.time() - started, device=str(ranks.device))
    after = Trainer(passes, job, train, heldout, progress).run()
    write_shards(engine.module, job.out, ranks)
    scored = chosen.head == "score"
    scores = heldout_scores(passes, heldout, settings.batch) if scored else None
    restore_attention(model_of(engine.module), settings.attn_implementation)
    choose, measure = (choose_scored, score_print) if scored else (choose_probes, fingerprint_of)
    measured = measure(engine, choose(heldout, settings.probes), ranks.device)
    assert progress.before is not None
    metrics = {
        "heldout_loss_before": progress.before["loss"],
        "heldout_loss_after": after["loss"],
    }
    finish(engine, job, ranks, progress, metrics, measured, scores=scores)
