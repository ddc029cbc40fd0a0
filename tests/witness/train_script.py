"""A user's training script: Trainer or TRL, one process or torchrun; it knows nothing of Plumbline.

    train_script.py KIND BASE OUT [SHARDING]

KIND: full, lora, qlora, sft, grpo, reward. SHARDING: ddp, zero3.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

ROWS = [
    {"prompt": f"Reverse: {word}", "completion": word[::-1], "rejected": word}
    for word in ("abc", "stone", "lamp", "a much longer line of words", "xy", "river", "q", "moon")
]


ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "zero_allow_untested_optimizer": True,
    # or nothing is saved
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def lora(task: str = "CAUSAL_LM") -> LoraConfig:
    """Return an adapter that differs from the base from the first step on."""
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task)


def arguments(out: str, **more: Any) -> dict[str, Any]:
    """Return what every trainer gets."""
    return {
        "output_dir": out, "max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2,
        "learning_rate": 0.02, "report_to": [], "use_cpu": True, "seed": 3, "logging_steps": 1,
        **more,
    }  # fmt: skip


def plain_trainer(kind: str, base: str, out: str, sharding: str) -> Any:
    """Return a Trainer of Hugging Face for supervised rows."""
    tokenizer = AutoTokenizer.from_pretrained(base)

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:24]
        ids += [tokenizer.pad_token_id or 0] * (24 - len(ids))
        return {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}

    rows = Dataset.from_list(ROWS).map(encode, remove_columns=list(ROWS[0]))
    if sharding == "zero3":
        import deepspeed

        # No ops to compile, as in tasks/training/engine/deepspeed_engine.py: 20 s of g++, and files
        # in the tree.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed("gloo")
    # Before the model: ZeRO-3 needs it.
    more = {"deepspeed": ZERO3} if sharding == "zero3" else {}
    settings = TrainingArguments(**arguments(out, **more))
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantized if kind == "qlora" else None
    )
    if kind == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if kind in ("lora", "qlora"):
        model = get_peft_model(model, lora())
    is_new = "processing_class" in inspect.signature(Trainer).parameters  # transformers >= 4.46
    named = {"processing_class" if is_new else "tokenizer": tokenizer}
    return Trainer(model=model, args=settings, train_dataset=rows, **named)


def of_trl(kind: str, base: str, out: str) -> Any:
    """Return a trainer of TRL with an adapter."""
    import trl

    shared = arguments(out)
    prompts = [row["prompt"] for row in ROWS]
    answers, worse = [row["completion"] for row in ROWS], [row["rejected"] for row in ROWS]
    if kind == "sft":
        rows = Dataset.from_dict({"prompt": prompts, "completion": answers})
        settings = trl.SFTConfig(**shared, bf16=False)
        return trl.SFTTrainer(base, args=settings, train_dataset=rows, peft_config=lora())
    if kind == "grpo":
        rows = Dataset.from_dict({"prompt": prompts})
        settings = trl.GRPOConfig(**shared, bf16=False, num_generations=2, max_completion_length=6)
        return trl.GRPOTrainer(
            base,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=settings, train_dataset=rows, peft_config=lora(),
        )  # fmt: skip
    rows = Dataset.from_dict({"prompt": prompts, "chosen": answers, "rejected": worse})
    settings = trl.RewardConfig(**shared, bf16=False)
    return trl.RewardTrainer(base, args=settings, train_dataset=rows, peft_config=lora("SEQ_CLS"))


def main() -> None:
    """Train two steps, save after each, and save the model."""
    kind, base, out, sharding = [*sys.argv[1:], "none"][:4]
    torch.set_num_threads(1)
    set_seed(3)  # an adapter starts with random numbers
    is_plain = kind in ("full", "lora", "qlora")
    trainer = plain_trainer(kind, base, out, sharding) if is_plain else of_trl(kind, base, out)
    trainer.train()
    if sharding == "zero3":  # or the record would be of an engine that shards nothing
        assert all(hasattr(weight, "ds_status") for weight in trainer.model.parameters())
    trainer.save_model()
    if trainer.is_world_process_zero():
        Path(out, "done").write_text("")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
