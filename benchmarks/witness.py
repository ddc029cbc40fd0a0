"""Cost of a record (`plumbline.witness`): seconds a save, and its share of a training.

    python -m benchmarks.witness [toy 0.5] [--steps 100]

Hugging Face's Trainer trains a LoRA adapter and saves once at the end; by default it saves every
500 steps. Bars: 2 s a save on the toy, 1 % of a run. Sizes are those of `shapes`; the toy is the
model of Plumbline's tests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row, table
from benchmarks.shapes import SIZES

TOY = "toy"
BATCH, LENGTH = {TOY: 8, "0.5": 1}, {TOY: 64, "0.5": 512}
BAR_S, BAR_SHARE = 2.0, 0.01


def build(name: str) -> tuple[Any, Any]:
    """Return model and tokenizer; the toy's tokenizer makes probes of full length at any size."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tasks.toy.pretrain import build_model, train_tokenizer
    from tasks.toy.splits import corpus

    texts = [f"{question} {answer}" for question, answer in corpus(200, seed=0)]
    tokenizer = train_tokenizer(texts, context=256)
    torch.manual_seed(0)
    if name == TOY:
        return build_model(tokenizer), tokenizer
    size = SIZES[name]
    config = Qwen2Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.inner,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def clocks() -> tuple[float, float]:
    """Return the time on the wall and the CPU time of all threads, in seconds."""
    return time.perf_counter(), time.process_time()


def elapsed(since: tuple[float, float]) -> list[float]:
    """Return the seconds on both clocks since an earlier reading."""
    return [now - then for now, then in zip(clocks(), since, strict=True)]


def measure(name: str, steps: int, out: Path) -> dict[str, float]:
    """Train, and return the cost of the training and of its save's record.

    Returns:
        `save_s` and `train_s`: seconds; `save_cpu_s` and `train_cpu_s`: seconds of CPU time, which
        other programs on the machine do not change much; `mb`: size of the record.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from tasks.witness.plumbline_witness import WitnessCallback

    cost: dict[str, float] = {}

    class Timed(WitnessCallback):
        def on_save(self, *arguments: Any, **named: Any) -> None:
            began = clocks()
            super().on_save(*arguments, **named)
            cost.update(zip(("save_s", "save_cpu_s"), elapsed(began), strict=True))

    model, tokenizer = build(name)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    ids = torch.randint(10, len(tokenizer), (BATCH[name] * 4, LENGTH[name])).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    settings = TrainingArguments(
        output_dir=str(out), max_steps=steps, save_steps=steps, report_to=[], use_cpu=True,
        per_device_train_batch_size=BATCH[name], logging_steps=steps, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=get_peft_model(model, config), args=settings, train_dataset=rows,
        processing_class=tokenizer, callbacks=[Timed()],
    )  # fmt: skip
    began = clocks()
    trainer.train()
    cost.update(zip(("train_s", "train_cpu_s"), elapsed(began), strict=True))
    record = out / f"checkpoint-{steps}" / "plumbline.witness"
    return cost | {"mb": sum(path.stat().st_size for path in record.iterdir()) / 1e6}


def row_of(name: str, steps: int) -> Row:
    """Return the table's row of one size."""
    with tempfile.TemporaryDirectory() as folder:
        cost = measure(name, steps, Path(folder))
    share = cost["save_s"] / cost["train_s"]
    return Row(
        f"{name}: record of one save, {steps} steps of {BATCH[name] * LENGTH[name]} tokens",
        f"{cost['save_s']:.2f} s ({cost['save_cpu_s']:.2f} s CPU), {cost['mb']:.1f} MB",
        f"{cost['train_s']:.0f} s ({cost['train_cpu_s']:.0f} s CPU)",
        f"{share:.2%}",
        f"<= {BAR_SHARE:.0%}" + (f", <= {BAR_S:g} s" if name == TOY else ""),
        share <= BAR_SHARE and (name != TOY or cost["save_s"] <= BAR_S),
        cost,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows and a JSON line. Returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="bench-witness", description=__doc__)
    parser.add_argument("sizes", nargs="*", choices=[TOY, "0.5"], default=[TOY])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    rows = [row_of(name, options.steps) for name in options.sizes]
    print(table(rows))
    print(json.dumps({"bench": "witness", "rows": [vars(row) for row in rows]}))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
