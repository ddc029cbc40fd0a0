"""Run by torchrun: two ranks with rows of very different lengths, on a vocabulary of a real size.

torchrun ... -m tests.training.model.uneven_ranks OUT BASE CASE ...

With this vocabulary the head computes 220 tokens at a time, so one rank has several portions and
the other has one. Every case is trained under ZeRO-0 and ZeRO-3, and writes its measurements.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.process.block_unused_imports import start_lean
from tasks.training.job import Peft, TrainJob, Zero
from tests.settings import Batch, Launch, Optim, Settings

NEW = "abc"
"""Tokens whose rows are trained; ids 64 to 66."""
BEGINNING = 15
"""Tokens that every text begins with, ids 55 to 69."""
COLLECTIVE_TIMEOUT_S = 90.0
SETTINGS = Settings(
    dtype="float32",
    optim=Optim(lr=1e-3),
    batch=Batch(1, 2),
    launch=Launch(nproc=2, threads=1),
)
LORA = Peft("lora", rank=4, target_modules=("q_proj", "v_proj"))
CASES = {
    "full": SETTINGS,
    "head-saved": replace(SETTINGS, peft=replace(LORA, modules_to_save=("lm_head",))),
    "head-lora": replace(SETTINGS, peft=replace(LORA, target_modules=("q_proj", "lm_head"))),
    "head-dora": replace(
        SETTINGS, peft=replace(LORA, target_modules=("q_proj", "lm_head"), use_dora=True)
    ),
    "rows": replace(SETTINGS, peft=LORA, new_tokens=tuple(NEW)),
    "frozen": replace(SETTINGS, peft=LORA),
}
ROUNDS = ((230, 20), (20, 230))
"""Tokens of rank 0 and of rank 1."""


def measure(job: TrainJob, ranks: Any) -> dict[str, list[float]]:
    """Take one step per round; return metrics summed over ranks, and the norms of the gradients."""
    import torch

    from tasks.training.engine.deepspeed_engine import start_engine
    from tasks.training.engine.zero_config import deepspeed_config
    from tasks.training.model.build import load_model, load_tokenizer
    from tasks.training.model.packed_model import TokenOutputs

    config = deepspeed_config(job.settings, ranks.world_size)
    model = load_model(job, ranks, config, tokenizer=load_tokenizer(job))
    engine = start_engine(model, config, job.settings.optim)
    found: dict[str, list[float]] = {"evaluated": [], "logprobs": [], "entropies": [], "norms": []}

    def note(name: str, value: torch.Tensor) -> None:
        found[name].append(float(ranks.total(value.detach().double().sum())))

    for number, lengths in enumerate(ROUNDS):
        row = row_of(lengths[ranks.rank], seed=number * ranks.world_size + ranks.rank)
        engine.eval()
        with torch.no_grad():
            note("evaluated", engine(row=row))
        engine.train()
        logprobs, entropies = engine(row=row, outputs=TokenOutputs(entropy=True))
        note("logprobs", logprobs)
        note("entropies", entropies)
        engine.backward(-(logprobs.sum() + 0.5 * entropies.sum()) / 100)
        engine.step()
        found["norms"].append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return found


def row_of(tokens: int, *, seed: int) -> Any:
    """Return a packed row of one text."""
    import numpy as np

    from tasks.training.tokens.examples import Examples
    from tasks.training.tokens.packing import pack

    ids = np.random.default_rng(seed).integers(0, 150_000, tokens).astype(np.int32)
    ids[:BEGINNING] = np.arange(BEGINNING) + 55
    bears = np.ones(tokens, np.uint8)
    examples = Examples(("text",), ("one",), ids, bears, np.array([0, tokens]), {})
    return pack(examples, (0,))


def main(out: Path, base: Path, names: list[str]) -> None:
    """Train all cases in this process group."""
    start_lean()
    from tasks.process.exit_process import end_process
    from tasks.training.engine.deepspeed_engine import Ranks

    ranks = Ranks(timeout_s=COLLECTIVE_TIMEOUT_S)
    for name in names:
        measures = {}
        for stage in (0, 3):
            settings = replace(CASES[name], zero=Zero(stage, persistence_threshold=0))
            measures[stage] = measure(TrainJob(settings, base, "d", out, out, out), ranks)
            gc.collect()
        if ranks.first:
            (out / f"{name}.json").write_text(json.dumps(measures))
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
