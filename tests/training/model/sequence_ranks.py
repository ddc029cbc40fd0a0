"""Run by torchrun: train jobs whose rows are divided over ranks, and write what they measured.

torchrun ... -m tests.training.model.sequence_ranks OUT SEQUENCE_PARALLEL CASE=BASE ...

The steps are those of a run: order, accumulation, reference and evaluation are its own code. Before
each step the full gradient of every tensor is read from DeepSpeed.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.process.block_unused_imports import start_lean
from tasks.training.job import Loss, Peft, TrainJob, Zero
from tests.settings import Batch, Launch, Optim, Settings
from tests.training.datasets import make_examples

LENGTHS = (7, 200, 17, 61, 6, 41, 5, 97, 30, 6, 12, 9, 160, 8, 8, 77)
"""Tokens of the sequences; some rows have an odd number of them."""
LONG = (8191, 11)
LORA = Peft("lora", rank=4)
SFT = Settings(
    dtype="float32",
    # A large epsilon makes AdamW follow the gradient, as SGD does.
    optim=Optim(lr=0.03, eps=1.0, weight_decay=0.01, scheduler="constant", max_grad_norm=1e9),
    batch=Batch(4, 8, max_steps=2, max_len=256),
    launch=Launch(nproc=1, threads=1),
)
PAIRS = replace(SFT, batch=replace(SFT.batch, micro_batch_size=2, global_batch_size=4))
DPO = replace(PAIRS, objective="dpo")
Z3 = Zero(3, persistence_threshold=0)
CHECKPOINTED = {"gradient_checkpointing": True}
CASES = {
    "sft-full-zero2": SFT,
    "sft-lora-zero3-checkpointed": replace(SFT, peft=LORA, zero=Z3, **CHECKPOINTED),
    "dpo-lora-zero2": replace(DPO, peft=LORA, loss=Loss(nll=0.5)),
    "experts-sft-full-zero2": replace(SFT, router_aux_loss_coef=0.5, **CHECKPOINTED),
}
MORE_CASES = {
    "experts-dpo-lora-zero3": replace(DPO, peft=LORA, zero=Z3, router_aux_loss_coef=0.5),
    "dpo-full-zero3": replace(DPO, zero=Z3),
    "window-sft-full-zero2": SFT,
    "sft-full-zero3-checkpointed": replace(SFT, zero=Z3, **CHECKPOINTED),
    "sft-full-zero0": replace(SFT, zero=Zero(0)),
    "sft-lora-zero2-reentrant": replace(
        SFT, peft=LORA, gradient_checkpointing_reentrant=True, **CHECKPOINTED
    ),
    "dpo-full-zero2-ipo": replace(DPO, loss=Loss(kind="ipo")),
    "simpo": replace(PAIRS, objective="simpo", peft=LORA),
    "orpo": replace(PAIRS, objective="orpo", peft=LORA),
    "kto": replace(PAIRS, objective="kto", peft=LORA),
    "reward": replace(
        PAIRS, objective="reward", peft=LORA, zero=Z3, optim=replace(SFT.optim, lr=0.001)
    ),
}
LONG_CASE = replace(SFT, batch=Batch(2, 2, max_steps=1, max_len=8192))
EVERY = {
    **CASES,
    **MORE_CASES,
    "long": LONG_CASE,
    "vocabulary": CASES["sft-full-zero2"],
}


def measure(job: TrainJob, ranks: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a job; return losses and metrics of each step, and the gradients by step and name."""
    from deepspeed.utils import safe_get_full_grad

    from tasks.training.accumulate import Accumulator
    from tasks.training.engine.checkpoint import Progress
    from tasks.training.engine.deepspeed_engine import start_engine
    from tasks.training.engine.partitions import trainable
    from tasks.training.engine.zero_config import deepspeed_config
    from tasks.training.loop import Trainer
    from tasks.training.model.build import load_model, load_tokenizer
    from tasks.training.model.packed_model import model_of, require_same, restore_attention
    from tasks.training.model.probe import measure_fingerprint
    from tasks.training.model.router_loss import coefficient
    from tasks.training.objectives import objective
    from tasks.training.objectives.forward_passes import Passes
    from tasks.training.objectives.reference_logprobs import with_reference
    from tasks.training.steps import begin_random
    from tasks.training.tokens.order import Order
    from tasks.training.tokens.packing import pack, trial_row

    settings = job.settings
    chosen = objective(settings.objective, vars(settings.loss))
    vocabulary = json.loads((job.base / "config.json").read_text())["vocab_size"]
    lengths = LONG if settings.batch.max_len > max(LENGTHS) * 2 else LENGTHS
    examples = make_examples(lengths, roles=len(chosen.roles), vocabulary=vocabulary)
    good = np.arange(len(examples), dtype=np.float32) % 2
    examples = replace(examples, values={"margin": good, "desirable": good})
    config = deepspeed_config(settings, ranks.world_size)
    model = load_model(job, ranks, config, tokenizer=load_tokenizer(job), head=chosen.head)
    engine = start_engine(model, config, settings.optim)
    require_same(engine, trial_row(examples))
    router = coefficient(model_of(engine.module).config.to_dict(), settings.router_aux_loss_coef)
    passes = Passes(engine, ranks, chosen, router)
    if chosen.needs_reference and settings.peft.kind == "none":
        examples = with_reference(examples, "train", passes=passes, job=job, begun=0)
    accumulator = Accumulator(engine, ranks, job)
    order = Order(examples, settings.batch, seed=0, world_size=ranks.replicas)
    steps, gradients = [], {}
    for step in range(1, order.steps + 1):
        begin_random(0, step=step, rank=ranks.rank)
        todo = order.step(step, ranks.replica)
        baseline = passes.baseline(examples, todo.rows)
        measures, broken = accumulator.passes(
            todo.rows,
            lambda row, t=todo, b=baseline: passes.loss(
                examples, row.chosen, counts=t.counts, baseline=b
            ),
        )
        assert not broken
        for name, parameter in trainable(engine.module).items():
            gradients[f"{step}.{name}"] = safe_get_full_grad(parameter).float().clone()
        engine.step()
        steps.append({**measures, "norm": float(engine.get_global_grad_norm())})
    accumulator.close()
    trainer = Trainer(engine, ranks, job, chosen, examples, examples, Progress())
    evaluated = trainer.evaluate("after")
    saved = saved_bytes(engine, pack(examples, order.step(1, ranks.replica).rows[0].chosen))
    restore_attention(model_of(engine.module), settings.attn_implementation)
    measured = measure_fingerprint(engine, examples, head=chosen.head, count=4, device=ranks.device)
    prints = measured.scores if chosen.head == "score" else measured.logprobs.ravel().tolist()
    engine.destroy()
    measures = {"steps": steps, "evaluated": evaluated, "print": list(prints), "saved": saved}
    return measures, gradients


def saved_bytes(engine: Any, row: Any) -> int:
    """Return the bytes of the activations that a pass over a row keeps for its backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine(row=row)
    return sum(len(storage) for place, storage in kept.items() if place not in weights)


def main(out: Path, sharing: int, wanted: list[str]) -> None:
    """Train all cases in this process group."""
    start_lean()
    from safetensors.torch import save_file

    from tasks.process.exit_process import end_process
    from tasks.training.engine.deepspeed_engine import Ranks

    ranks = Ranks(timeout_s=90.0, sequence_parallel=sharing)
    for case in wanted:
        name, _, base = case.partition("=")
        kind = EVERY[name]
        launch = replace(kind.launch, nproc=ranks.world_size, sequence_parallel=sharing)
        settings = replace(kind, launch=launch)
        job = TrainJob(settings, Path(base), "d", out, out, out / f"{name}-checkpoints")
        measures, gradients = measure(job, ranks)
        if ranks.first:
            (out / f"{name}.json").write_text(json.dumps(measures))
            save_file(gradients, out / f"{name}.safetensors")
        gc.collect()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
