"""GRPO runs that `make bench-rl` times, each in its own process:

    python -m benchmarks.contenders.grpo ours '{"base": ..., "data": ..., "out": ...}'

All have the same number of prompts, responses per prompt and token limit, the same reward function
and the same LoRA adapter on all linear layers. All take one optimizer step per iteration, without a
reference model and without gradient checkpointing. The first iteration warms up.
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

from benchmarks.contenders.training import trl_arguments
from benchmarks.harness import say
from benchmarks.inputs import MAX_TOKENS, RANK, lora_config

LR = 1e-5


@dataclass(frozen=True)
class Ask:
    """Arguments of a run.

    Attributes:
        base: folder of the model.
        data: folder of the prompts and the reward function.
        out: output folder; must not exist.
        dtype: torch dtype name of the model.
        prompts: prompts per iteration.
        samples: responses per prompt.
        tokens: maximum number of tokens of a response.
        micro: responses per micro-batch.
        timed: iterations after the first.
        engine: `rollout.engine` of ours; `server` is one vLLM server with a thread of its own.
        staleness: `rl.staleness` of ours.
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
    engine: str = "vllm"
    staleness: int = 0

    @property
    def replies(self) -> int:
        """Responses per iteration."""
        return self.prompts * self.samples


def ours(ask: Ask) -> None:
    """Run the stage `train` with objective grpo. An iteration lasts from one event to the next."""
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
        overhead=[record["overhead"] for record in records],
        tokens=[round(record["length"] * ask.replies) for record in records],
        phases={
            name.removeprefix("seconds/"): sum(record[name] for record in records) / len(records)
            for name in records[0]
            if name.startswith("seconds/")
        },
    )


def _settings(ask: Ask) -> Any:
    from tasks.config.defaults import ALGORITHMS
    from tasks.training.job import Batch, Evaluate, Launch, Optim, Peft, Settings, Zero

    rl = {
        **ALGORITHMS["grpo"],
        "clip_high": 0.2,
        "rollout_batch_size": ask.prompts,
        "num_generations": ask.samples,
        "iterations": 1 + ask.timed,
        "eval_prompts": 1,
        "staleness": ask.staleness,
    }
    lengths = {"max_new_tokens": ask.tokens, "max_prompt_len": 128}
    rollout = {**lengths, "offload_trainer": False}
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or None
    if ask.engine == "server":
        threads = 1
        rollout |= {"engine": "server", "servers": 1, "kv_cache_gib": 1.0}
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
        launch=Launch(nproc=1, threads=threads),
        evaluate=Evaluate(best_metric="reward"),
        online={
            "rl": rl,
            "rollout": rollout,
            "reward": {"function": f"{ask.data}/reward.py:score"},
        },
    )


def trl(ask: Ask) -> None:
    """Run TRL's `GRPOTrainer` with its defaults; on a GPU with vLLM in its process, like ours."""
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
        **trl_arguments(ask.dtype),
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
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history
               if "completions/mean_length" in entry]  # fmt: skip
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
