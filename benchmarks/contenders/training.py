"""The contenders of `make bench-training`, each in its own process:

    python -m benchmarks.contenders.training ours BASE DATA OUT '{"objective": "sft", ...}'

Each takes the same number of optimizer steps and prints one JSON line: tokens (without padding) and
seconds of every step after the first. All use AdamW and LoRA of the same rank on all linear layers,
without gradient checkpointing unless `checkpointing` is set.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import say
from benchmarks.inputs import RANK

IGNORED = -100
MICRO = 8


@dataclass(frozen=True)
class Ask:
    """Arguments of a run; `rows` is the number of examples per micro-batch."""

    base: Path
    data: Path
    out: Path
    objective: str = "sft"
    steps: int = 5
    rows: int = MICRO
    dtype: str = "float32"
    checkpointing: bool = False
    nproc: int = 1
    lr: float = 1e-5


def ours(ask: Ask) -> None:
    """Run the stage `train`, launcher included; its events give the time of each step."""
    from tasks.train import train
    from tasks.training.job import Batch, Launch, Optim, Peft, Settings, Zero

    settings = Settings(
        objective=ask.objective,
        dtype=ask.dtype,
        gradient_checkpointing=ask.checkpointing,
        save_steps=0,
        probes=2,
        peft=Peft("lora", rank=RANK, alpha=2 * RANK),
        zero=Zero(0),
        optim=Optim(lr=ask.lr),
        batch=Batch(ask.rows, ask.rows * ask.nproc, max_steps=ask.steps, max_len=1024),
        launch=Launch(nproc=ask.nproc, threads=int(os.environ.get("OMP_NUM_THREADS", 0)) or None),
    )
    started, seen = time.monotonic(), []
    steps: list[tuple[int, float]] = []

    def on_event(event: dict[str, Any]) -> None:
        seen.append((event["event"], time.monotonic() - started))
        if event["event"] == "step":
            # From event to event, so the time includes everything that the loop does.
            since = seen[-2][1] if seen[-2][0] == "step" else seen[-1][1] - event["step_s"]
            steps.append((round(event["tokens_per_s"] * event["step_s"]), seen[-1][1] - since))

    ask.out.mkdir(parents=True)
    train(
        ask.out,
        base=ask.base,
        data=ask.data,
        base_digest="b" * 64,
        settings=settings,
        checkpoints=ask.out.with_name(f"{ask.out.name}-checkpoints"),
        resume="never",
        log=logging.getLogger("bench"),
        log_path=ask.out.with_name(f"{ask.out.name}.log"),
        on_event=on_event,
    )
    first = next(at for name, at in seen if name == "step")
    say(steps=steps[1:], first_step_s=first)


def trl(ask: Ask, *, defaults: bool = False) -> None:
    """Run TRL's trainer of the objective, with its defaults except for the fields of `Ask`.

    With `defaults`, batch, number format and checkpointing are TRL's own, too.
    """
    import trl
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    kinds = {"sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer)}
    config, trainer = kinds[ask.objective]
    chosen = trl_arguments(ask.dtype)
    if defaults:
        chosen = {k: v for k, v in chosen.items() if k not in ("model_init_kwargs", "bf16")}
    else:
        rows = ask.rows * ask.nproc
        chosen |= {"per_device_train_batch_size": rows, "max_length": 1024}
        chosen["gradient_checkpointing"] = ask.checkpointing
    arguments = config(output_dir=str(ask.out), max_steps=ask.steps, learning_rate=ask.lr, **chosen)
    made = trainer(
        model=str(ask.base),
        args=arguments,
        train_dataset=_for_trl(load_dataset("json", data_files=str(ask.data / "train.jsonl"))),
        processing_class=AutoTokenizer.from_pretrained(ask.base),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    tokens, ends = [], []
    collate = made.data_collator

    def counting(examples: list[Any]) -> Any:
        batch = collate(examples)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    made.data_collator = counting
    made.add_callback(Clock())
    begun = time.monotonic()
    made.train()
    say(steps=_steps(tokens, [begun, *ends]))


def _for_trl(loaded: Any) -> Any:
    rows = loaded["train"]
    if "messages" not in rows.column_names:
        return rows.remove_columns(["id"])
    return rows.map(
        lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
        remove_columns=rows.column_names,
    )


def trl_arguments(dtype: str) -> dict[str, Any]:
    """Return the arguments of a TRL configuration that all runs share: no logs, no checkpoints.

    Args:
        dtype: torch dtype name of the weights.
    """
    import torch

    gpu = torch.cuda.is_available()
    return {
        "model_init_kwargs": {"dtype": dtype},
        "use_cpu": not gpu,
        "bf16": dtype == "bfloat16" and gpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _steps(tokens: list[int], marks: list[float]) -> list[tuple[int, float]]:
    """Return tokens and seconds of every step but the first, which warms up."""
    times = [b - a for a, b in itertools.pairwise(marks)]
    return list(zip(tokens[: len(times)], times, strict=True))[1:]


def _load(ask: Ask) -> tuple[Any, list[tuple[list[int], list[bool]]]]:
    """Return the base, and (token ids, True for tokens with loss) of every conversation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ask.base)
    samples = []
    for line in (ask.data / "train.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        options = {"tokenize": True, "return_dict": False}
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        ids = tokenizer.apply_chat_template(messages, **options)
        samples.append((ids, [place >= len(prompt) for place in range(len(ids))]))
    model = AutoModelForCausalLM.from_pretrained(ask.base, dtype=getattr(torch, ask.dtype))
    return model.to(device()), samples


def device() -> Any:
    """Return the device of all contenders: the first GPU, or the CPU if there is none."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _adapted(model: Any) -> tuple[Any, Any]:
    """Return the model with a LoRA adapter, and its optimizer."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config).train()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def _timed(ask: Ask, forward: Callable[[int], tuple[int, Any]], model: Any, optimizer: Any) -> None:
    """Run the optimizer steps and print the report; `forward` returns (tokens, loss) of a step."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    tokens, marks = [], [time.monotonic()]
    for step in range(ask.steps):
        count, loss = forward(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        tokens.append(count)
        marks.append(time.monotonic())
    say(steps=_steps(tokens, marks))


def padded(ask: Ask) -> None:
    """Run a bare PyTorch loop: padded batches in random order, with the model's own loss."""
    import torch

    model, samples = _load(ask)
    model, optimizer = _adapted(model)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()

    def forward(step: int) -> tuple[int, Any]:
        batch = [samples[i] for i in order[step * ask.rows : (step + 1) * ask.rows]]
        longest = max(len(ids) for ids, _ in batch)
        ids, mask = (torch.zeros(len(batch), longest, dtype=torch.long) for _ in "ab")
        labels = torch.full_like(ids, IGNORED)
        for row, (own, bears) in enumerate(batch):
            size = len(own)
            ids[row, :size], mask[row, :size] = torch.tensor(own), 1
            labels[row, :size] = torch.where(torch.tensor(bears), ids[row, :size], IGNORED)
        ids, mask, labels = (tensor.to(device()) for tensor in (ids, mask, labels))
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        return int(mask.sum()), out.loss

    _timed(ask, forward, model, optimizer)


def bare(ask: Ask) -> None:
    """Run forward, backward and optimizer step on our packed rows; packing is not timed."""
    import numpy as np

    from tasks.training.job import Batch
    from tasks.training.model.packed_model import accept_packed_rows
    from tasks.training.tokens.examples import Examples
    from tasks.training.tokens.rows import Order, pack

    model, samples = _load(ask)
    accept_packed_rows(model)
    model, optimizer = _adapted(model)
    bounds = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in samples])])
    ids = np.concatenate([np.array(ids, np.int32) for ids, _ in samples])
    bears = np.concatenate([np.array(bears, np.uint8) for _, bears in samples])
    examples = Examples(("text",), [str(i) for i in range(len(samples))], ids, bears, bounds, {})
    batch = Batch(ask.rows, ask.rows, max_steps=ask.steps, max_len=1024)
    order = Order(examples, batch, seed=0, world_size=1)
    rows = [
        pack(examples, order.step(i + 1, 0).rows[0].chosen).to(device()) for i in range(ask.steps)
    ]

    def forward(step: int) -> tuple[int, Any]:
        row = rows[step]
        return row.ids.numel(), -model(row=row).mean()

    _timed(ask, forward, model, optimizer)


JOBS: dict[str, Callable[[Ask], None]] = {
    "ours": ours,
    "trl": trl,
    "trl-defaults": partial(trl, defaults=True),
    "padded": padded,
    "bare": bare,
}

if __name__ == "__main__":
    name, base, data, out, more = sys.argv[1:]
    JOBS[name](Ask(Path(base), Path(data), Path(out), **json.loads(more)))
