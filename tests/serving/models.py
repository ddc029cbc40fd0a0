"""Tiny real models made on the spot, with weights that give each prompt a response of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tasks.drift.fingerprint import Fingerprint
from tests.tiny import make_tokenizer, save_base

END = make_tokenizer().eos_token_id
WORDS = ("ape", "bee", "cat", "dog", "eel", "fox", "gnu", "hen")
CONVERSATIONS = [
    [{"role": "user", "content": f"Reverse: {w}"}, {"role": "assistant", "content": w[::-1]}]
    for w in WORDS
]


def write_model(folder: Path, seed: int) -> Path:
    """Write a model folder."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    save_base(folder, make_tokenizer(), hidden_size=128, intermediate_size=192)
    draw, tensors = torch.Generator().manual_seed(seed), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = (0.08 * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def live_fingerprint(model: Any, probes: list[list[int]]) -> Fingerprint:
    """Return the fingerprint as a training engine takes it: each probe alone, full vocabulary."""
    import torch

    rows = []
    with torch.no_grad():
        for probe in probes:
            logits = model(input_ids=torch.tensor([probe]), use_cache=False).logits[0, :-1]
            rows.append(torch.log_softmax(logits.float(), -1))
    logprobs = torch.cat(rows)
    ids = np.tile(np.arange(logprobs.shape[1], dtype=np.int32), (len(logprobs), 1))
    top1 = logprobs.argmax(-1).to(torch.int32).numpy()
    return Fingerprint(tuple(map(tuple, probes)), ids, logprobs.numpy(), top1, "deepspeed", 1e-6)


def load(folder: Path) -> Any:
    """Load the model in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()
