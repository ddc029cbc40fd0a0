"""Whole GRPO runs that `make bench-rl` times, each in a process of its own:

    python -m benchmarks.rl_loop_jobs ours '{"base": ..., "data": ..., "out": ...}'

Both ask the same number of prompts as often, answer until the model ends or as many tokens are
there, score with the same function, and take one optimizer step an iteration on a LoRA adapter of
one rank on all linear layers, without a reference and without gradient checkpointing. The first
iteration warms up.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rl_rollout_jobs import say
from benchmarks.rl_setting import MAX_TOKENS, RANK, lora_config
from benchmarks.trl_arguments import common

LR = 1e-5


@dataclass(frozen=True)
class Ask:
    """What is to be run.

    Attributes:
        base: folder of the model.
        data: of prompts and the reward.
        out: a folder that is not there yet.
        dtype: of the model.
        prompts: of an iteration.
        samples: replies to each.
        tokens: of a reply at most.
        micro: replies of a micro-batch.
        timed: iterations after the first.
    """

    base: str
    data: str
    out: str
    dtype: str = "float32"
    prompts: int = 16
    samples: int = 4
    tokens: int = MAX_TOKENS
    micro: int = 16
    timed: int = 1

    @property
    def replies(self) -> int:
        """Of an iteration."""
        return self.prompts * self.samples


def ours(ask: Ask) -> None:
    """The stage `train` with objective grpo; iterations from one's event to the next one's."""
    from tasks.train import train

    out = Path(ask.out)
    out.mkdir(parents=True)
    steps: list[tuple[float, dict[str, Any]]] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            steps.append((time.monotonic(), event))

    train(
        out,
        base=Path(ask.base),
        data=Path(ask.data),
        base_digest="b" * 64,
        settings=_settings(ask),
        checkpoints=out.with_name(f"{out.name}-checkpoints"),
        resume="never",
        log=logging.getLogger("bench"),
        log_path=out.with_name(f"{out.name}.log"),
        on_event=on_event,
    )
    records = [event for _, event in steps[1:]]
    say(
        seconds=[b - a for (a, _), (b, _) in itertools.pairwise(steps)],
        overhead=[one["overhead"] for one in records],
        tokens=[round(one["length"] * ask.replies) for one in records],
        phases={
            name.removeprefix("seconds/"): sum(one[name] for one in records) / len(records)
            for name in records[0]
            if name.startswith("seconds/")
        },
    )


def _settings(ask: Ask) -> Any:
    from tasks.training.job import Batch, Evaluate, Launch, Optim, Peft, Settings, Zero

    rl = {
        "prompts": ask.prompts,
        "samples": ask.samples,
        "iterations": 1 + ask.timed,
        "eval_prompts": 1,
    }
    lengths = {"max_new_tokens": ask.tokens, "max_prompt_len": 128}
    rollout = {**lengths, "offload_trainer": False}
    return Settings(
        objective="grpo",
        dtype=ask.dtype,
        gradient_checkpointing=False,
        save_steps=0,
        probes=1,
        peft=Peft("lora", rank=RANK, alpha=2 * RANK),
        zero=Zero(0),
        optim=Optim(lr=LR, scheduler="constant"),
        batch=Batch(ask.micro, ask.replies, max_len=1024),
        launch=Launch(nproc=1, threads=int(os.environ.get("OMP_NUM_THREADS", 0)) or None),
        evaluate=Evaluate(best_metric="reward"),
        online={
            "rl": rl,
            "rollout": rollout,
            "reward": {"function": f"{ask.data}/reward.py:score"},
        },
    )


def trl(ask: Ask) -> None:
    """TRL's `GRPOTrainer` by its defaults; on a GPU with vLLM in its process, as we have it."""
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=ask.out,
        per_device_train_batch_size=ask.micro,
        gradient_accumulation_steps=ask.replies // ask.micro,
        num_generations=ask.samples,
        max_completion_length=ask.tokens,
        max_steps=1 + ask.timed,
        learning_rate=LR,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,
        use_vllm=torch.cuda.is_available(),
        vllm_mode="colocate",
        **common(ask.dtype),
    )
    trainer = GRPOTrainer(
        model=ask.base,
        reward_funcs=runpy.run_path(f"{ask.data}/reward.py")["score"],
        args=arguments,
        train_dataset=_for_trl(Path(ask.data)),
        processing_class=AutoTokenizer.from_pretrained(ask.base),
        peft_config=lora_config(),
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    trainer.add_callback(Clock())
    trainer.train()
    lengths = [one["completions/mean_length"] for one in trainer.state.log_history
               if "completions/mean_length" in one]  # fmt: skip
    say(
        seconds=[b - a for a, b in itertools.pairwise(ends)],
        tokens=[round(length * ask.replies) for length in lengths[1:]],
    )


def _for_trl(folder: Path) -> Any:
    from datasets import Dataset

    rows = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    return Dataset.from_list([{"prompt": row["messages"]} for row in rows])


JOBS: dict[str, Callable[[Ask], None]] = {"ours": ours, "trl": trl}

if __name__ == "__main__":
    JOBS[sys.argv[1]](Ask(**json.loads(sys.argv[2])))
