"""`convert.quantize=gguf:TYPE` with llama.cpp's own converter, quantiser and server.

PLUMBLINE_PEERS=~/peers tests/delivery/peers.sh ggml        downloads and builds it, ten minutes
PLUMBLINE_PEERS=~/peers .venv/bin/python -m pytest -m peers tests/delivery/test_gguf.py

The converter refuses a tokenizer that it does not know, so the model has Qwen2's: 152,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasks.drift.fingerprint import quantized_profile
from tests.delivery.conftest import Done
from tests.delivery.peers import peer_folder

Run = Callable[..., Done]
pytestmark = [pytest.mark.peers, pytest.mark.timeout(1800)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    """Return the folder of llama.cpp."""
    return peer_folder("ggml") / "llama.cpp"


@pytest.fixture(scope="module")
def qwen2(llama_cpp: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Qwen2 of random weights with the real tokenizer, from llama.cpp's own test files."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "qwen2"
    tokenizer = AutoTokenizer.from_pretrained(
        llama_cpp / "models", gguf_file="ggml-vocab-qwen2.gguf"
    )
    tokenizer.chat_template = CHATML
    tokenizer.eos_token = "<|im_end|>"
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "profile"), [("q8_0", "auto"), ("q6_k", "int4")])
def test_a_gguf_file_is_measured_and_served_by_llama_cpp(
    kind: str, profile: str, qwen2: Path, llama_cpp: Path, deliver: Run, tmp_path: Path
) -> None:
    words = [f"convert.quantize=gguf:{kind}", f"convert.llama_cpp={llama_cpp}"]
    words.append(f"convert.quantize_profile={profile}")
    done = deliver(f"source={qwen2}", *words, engine="vllm", timeout=900)
    assert f"next: llama-server -m {tmp_path / 'out'}/model-{kind}.gguf" in done.output
    assert not list((tmp_path / "out").glob("*.safetensors"))
    stages = {stage["name"]: stage for stage in done.summary["stages"]}
    limit = quantized_profile(f"gguf:{kind}", profile).mean_kl
    for name in ("quantize", "smoke_quantized"):
        assert 0 <= stages[name]["drift"]["mean_kl"] < limit
