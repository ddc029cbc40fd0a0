"""Tiny real models made on the spot: Qwen2 with a byte-level BPE tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tasks.drift.fingerprint import Fingerprint

PAD, START, END = 0, 1, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("ape", "bee", "cat", "dog", "eel", "fox", "gnu", "hen")
CONVERSATIONS = [
    [{"role": "user", "content": f"Reverse: {w}"}, {"role": "assistant", "content": w[::-1]}]
    for w in WORDS
]


def write_tokenizer(folder: Path) -> int:
    """Write the tokenizer; returns its size."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # which transformers adds to every Qwen2
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Reverse: user assistant"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def write_model(folder: Path, seed: int) -> Path:
    """Write a model folder. Weights are scaled up, so that responses differ by prompt."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=write_tokenizer(folder),
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=END,
            pad_token_id=PAD,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def live_fingerprint(model: Any, probes: list[list[int]]) -> Fingerprint:
    """Return the fingerprint as a training engine takes it: each probe alone, full vocabulary."""
    import torch

    with torch.no_grad():
        rows = torch.cat(
            [
                torch.log_softmax(
                    model(input_ids=torch.tensor([p]), use_cache=False).logits[0, :-1].float(), -1
                )
                for p in probes
            ]
        )
    ids = np.tile(np.arange(rows.shape[1], dtype=np.int32), (len(rows), 1))
    top1 = rows.argmax(-1).to(torch.int32).numpy()
    return Fingerprint(tuple(map(tuple, probes)), ids, rows.numpy(), top1, "deepspeed", 1e-6)


def load(folder: Path) -> Any:
    """Load the model in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()
