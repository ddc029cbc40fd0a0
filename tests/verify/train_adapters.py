"""A user's training: one base, several adapters, each with a witness in every checkpoint.

    train_adapters.py OUT COUNT

Writes OUT/base, OUT/lora-0 ... OUT/lora-<COUNT-1> (each with checkpoint-2 and checkpoint-3), and
OUT/qlora, which was trained on the base in NF4.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from plumbline_witness import WitnessCallback
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tasks.toy.pretrain import pretrain
from tasks.toy.splits import corpus

STEPS = 3
LENGTH = 48


def train(base: Path, out: Path, seed: int, *, quantized: bool = False) -> None:
    """Train an adapter on rows of its own, with prompts of its own among the probes."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=four_bit if quantized else None
    )
    if quantized:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:LENGTH]
        mask = [1] * len(ids) + [0] * (LENGTH - len(ids))
        ids += [tokenizer.pad_token_id] * (LENGTH - len(ids))
        labels = [token if kept else -100 for token, kept in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    pairs = corpus(32, seed=seed)
    rows = Dataset.from_list(
        [{"question": question, "answer": answer[::-1]} for question, answer in pairs]
    )
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, save_steps=1, per_device_train_batch_size=8,
        learning_rate=0.01, report_to=[], use_cpu=True, seed=seed, logging_steps=1,
        lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows.map(encode, remove_columns=["question", "answer"]),
        processing_class=tokenizer,
        callbacks=[WitnessCallback(prompts=[question for question, _ in pairs[:2]], texts=True)],
    )
    trainer.train()
    trainer.save_model()


def begin_with_a_token(base: Path) -> None:
    """Let texts and conversations begin with a BOS token, as those of Llama do."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    begin = "<|endoftext|>"
    number = tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, number)]
    )
    tokenizer.bos_token = begin
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.save_pretrained(base)


def main() -> None:
    """Make the base, and train all adapters."""
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    base = out / "base"
    base.mkdir(parents=True)
    pretrain(base, steps=120, seed=5)
    begin_with_a_token(base)
    torch.use_deterministic_algorithms(False)
    for seed in range(count):
        train(base, out / f"lora-{seed}", seed)
    train(base, out / "qlora", 0, quantized=True)


if __name__ == "__main__":
    main()
