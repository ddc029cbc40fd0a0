"""Memory of the serving engine: computed by hand, and refused with an override if too large."""

from __future__ import annotations

from functools import cache
from typing import Any

from flows.cli.config import compose_config
from tasks.config.checks.engine import EngineMemory, cache_fits, engine_memory, host_fits

GIB = 2**30
QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
WEIGHTS = 7_615_616_512 - 28 * 4_608


@cache
def _settings() -> dict[str, Any]:
    return compose_config(["model.dtype=bfloat16"]).settings


def settings(**smoke: Any) -> dict[str, Any]:
    return {**_settings(), "smoke": {**_settings()["smoke"], **smoke}}


def test_an_engine_on_a_cpu_by_hand() -> None:
    """56 KiB per token: 2 x 28 layers x 4 heads x 128 x 2 bytes; 1 GiB holds 18,724 tokens."""
    engine = engine_memory(QWEN_7B, settings(max_model_len=1000), gpu_bytes=None)
    assert (engine.weights, engine.cache, engine.token) == (2 * WEIGHTS, GIB, 57_344)
    assert engine.longest == 1024 * 57_344  # blocks of 128
    assert engine.together == 18
    assert cache_fits(engine, on_gpu=False) == []
    assert "56.0 KiB a token, room for 18 of 64 sequences of 1000 tokens" in str(engine)


def test_the_context_holds_prompt_and_response() -> None:
    plain = _settings()
    expected = plain["train"]["max_len"] + plain["smoke"]["max_new_tokens"] + 8
    assert engine_memory(QWEN_7B, settings(), gpu_bytes=None).context == expected
    short = {**QWEN_7B, "max_position_embeddings": 128}
    assert engine_memory(short, settings(), gpu_bytes=None).context == 128


def test_transformers_takes_one_prompt_at_a_time() -> None:
    alone = engine_memory(
        QWEN_7B, settings(engine="transformers", max_model_len=10), gpu_bytes=None
    )
    assert alone.cache == 10 * 57_344


def test_a_cache_too_small_for_one_sequence() -> None:
    engine = engine_memory(QWEN_7B, settings(max_model_len=32768), gpu_bytes=None)
    (finding,) = cache_fits(engine, on_gpu=False)
    assert finding.what == "smoke.kv_cache_gib"
    assert finding.override == "smoke.kv_cache_gib=2 or smoke.max_model_len=18688"
    assert "one sequence of 32768 tokens, 1.8 GiB" in finding.allowed
    turned = engine_memory(QWEN_7B, settings(max_model_len=18688), gpu_bytes=None)
    assert cache_fits(turned, on_gpu=False) == []


def test_a_gpu_that_is_full_of_weights() -> None:
    """vLLM takes 0.92 of the GPU; the KV cache is the rest beside weights and libraries."""
    full = engine_memory(QWEN_7B, settings(), gpu_bytes=16 * GIB)
    (finding,) = cache_fits(full, on_gpu=True)
    assert finding.override == "a smaller model"
    larger = engine_memory(QWEN_7B, settings(), gpu_bytes=24 * GIB)
    assert larger.cache == int(0.92 * 24 * GIB) - 2 * WEIGHTS - GIB
    assert cache_fits(larger, on_gpu=True) == []


def test_the_host_has_to_hold_the_engine() -> None:
    engine = EngineMemory(weights=4 * GIB, cache=8 * GIB, token=1024, context=128, block=128)
    assert host_fits(engine, 13 * GIB, 8) == []
    (finding,) = host_fits(engine, 10 * GIB, 8)
    assert finding.override == "smoke.kv_cache_gib=5 or smoke=transformers"
    (finding,) = host_fits(engine, 4 * GIB, 8)
    assert finding.override == "a machine with more memory"
