"""Run by torchrun: several short trainings in turn, in one pair of processes.

Importing DeepSpeed takes longer than all of these trainings. Each job takes a few steps on the
examples in its data folder, and writes the files of a rank: partitions, configs, a fingerprint.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.partitions import describe, own_partitions, write_partitions
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.model import fused_lora
from tasks.training.model.build import load_model, load_tokenizer
from tasks.training.model.packed_model import model_of, require_same, restore_attention
from tasks.training.model.probe import measure_fingerprint
from tasks.training.objectives import ModelOutput, Objective, objective
from tasks.training.outputs import write_configs
from tasks.training.tokens.examples import Examples, open_examples
from tasks.training.tokens.order import Order
from tasks.training.tokens.packing import pack


def train_briefly(job: TrainJob, ranks: Ranks) -> None:
    settings = job.settings
    chosen = objective(settings.objective, vars(settings.loss))
    examples = open_examples(job.data)
    config = deepspeed_config(settings, ranks.world_size, gpu=ranks.gpu)
    tokenizer = load_tokenizer(job)
    model = load_model(job, ranks, config, tokenizer=tokenizer, head=chosen.head)
    engine = start_engine(model, config, settings.optim)
    require_same(engine, pack(examples, (0, 1)).to(ranks.device))
    write_partitions(
        own_partitions(engine.module, rank=ranks.rank, world_size=ranks.world_size),
        job.out / "start",
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    fused = fused_layers(engine.module)
    losses = take_steps(engine, examples, chosen, job, ranks)
    write_partitions(
        own_partitions(engine.module, rank=ranks.rank, world_size=ranks.world_size),
        job.out / "shards",
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    restore_attention(model_of(engine.module), settings.attn_implementation)
    fingerprint = measure_fingerprint(
        engine, examples, head=chosen.head, count=settings.probes, device=ranks.device
    )
    if ranks.first:
        parts = describe(
            engine.module, world_size=ranks.world_size, zero_stage=settings.zero.stage, mode="-"
        )
        (job.out / "partitions.json").write_text(json.dumps(parts))
        (job.out / "losses.json").write_text(json.dumps(losses))
        (job.out / "fused.json").write_text(json.dumps(fused))
        write_configs(job, engine.module)
        fingerprint.save(job.out / "print")
    engine.destroy()


def fused_layers(model: Any) -> int:
    """Return the number of layers in the engine that `fused_lora.py` replaced."""
    own = [layer.__dict__.get("forward") for layer in model.modules()]
    return sum(getattr(one, "__module__", "") == fused_lora.__name__ for one in own)


def take_steps(
    engine: Any, examples: Examples, chosen: Objective, job: TrainJob, ranks: Ranks
) -> list[float]:
    order = Order(examples, job.settings.batch, seed=job.settings.seed, world_size=ranks.world_size)
    losses = []
    for step in range(1, order.steps + 1):
        todo = order.step(step, ranks.rank)
        total = 0.0
        for row in todo.rows:
            packed = pack(examples, row.chosen).to(ranks.device)
            out = engine(row=packed)
            scored = chosen.head == "score"
            output = ModelOutput(scores=out) if scored else ModelOutput(logprobs=out)
            value = chosen.loss(output, packed, todo.counts).value * row.counted
            engine.backward(value * len(todo.rows) * ranks.world_size)
            engine.step()
            total += float(value.detach())
        losses.append(sum(ranks.all_objects(total)))
    return losses


def refuse_to_move_4_bits() -> None:
    """Make transformers refuse to move or cast a 4-bit model, as versions before it did.

    Newer versions refuse only casts.
    """
    from transformers import PreTrainedModel

    def refusing(name: str) -> Any:
        own = getattr(PreTrainedModel, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "is_loaded_in_4bit", False):
                raise ValueError(f"`.{name}` is not supported for `4-bit` bitsandbytes models")
            return own(self, *args, **kwargs)

        return method

    for name in ("to", "cuda", "cpu", "half", "float", "bfloat16"):
        setattr(PreTrainedModel, name, refusing(name))


def main() -> None:
    refuse_to_move_4_bits()
    ranks = Ranks()
    for path in map(Path, sys.argv[1:]):
        job = TrainJob.read(path)
        try:
            train_briefly(job, ranks)
        except Exception:
            # One that fails alike on every rank leaves the others to run.
            if ranks.first:
                (job.out / "failure").write_text(traceback.format_exc())
        gc.collect()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
