"""A model that is too large for this machine: the plan lists overrides that need less memory."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from flows.chain.steps import Step
from flows.cli.config import Composed, compose_config
from flows.cli.plan import check, render
from tasks.config.checks.engine import rollout_memory
from tasks.config.checks.phases import in_words
from tasks.core.errors import ConfigError
from tasks.training.memory.estimate import LIBRARIES
from tasks.training.memory.sizes import Sizes
from tests.config.test_plan import program
from tests.release.hub import TOKEN, hub_on_loopback

QWEN_72B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}

HALF = "model.dtype=bfloat16"
"""The folder has one small tensor, which is no reason to compute in float32."""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return a folder with a config.json of 72 B parameters and one tensor's header."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_72B))
    (folder / "tokenizer.json").write_text("{}")
    entry = {"model.layers.0.self_attn.q_proj.weight": {
        "dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}  # fmt: skip
    header = json.dumps(entry).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    return folder


def composed_of(large: Path, *overrides: str) -> Composed:
    arguments = ["+exp=sft_full", "model=hf", f"model.path={large}", HALF, "train.max_len=4096"]
    return compose_config([*arguments, f"paths.runs={large.parent / 'runs'}", *overrides])


def memory_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("  error: memory")]


def peak_gib(text: str) -> float:
    return float(re.search(r"memory a rank: ([\d.]+) GiB at its peak", text)[1])


def test_a_model_that_is_too_large_is_answered_with_overrides(large: Path) -> None:
    text = render([Step("", composed_of(large))])
    training, serving = memory_lines(text)
    override = training.partition(" -> ")[2]
    named = override.split(" or ")
    assert {"peft=lora", "train.micro_batch_size=1"} & set(named)
    before = peak_gib(text)
    for name in (named[0], named[-1]):
        assert peak_gib(render([Step("", composed_of(large, name))])) < before
    assert serving.endswith(
        " -> a machine with more memory"
    )  # 135 GiB of weights, whatever the cache
    assert "memory of smoke_eval: 139698.5 MiB" in text
    assert "KV cache 1024.0 MiB: 320.0 KiB a token, room for 0 of 64 sequences of" in text


def test_the_plan_counts_the_engines_beside_the_ranks(large: Path) -> None:
    config = json.loads((large / "config.json").read_text())
    composed = compose_config(["+exp=grpo", "model=hf", f"model.path={large}", HALF,
                               f"paths.runs={large.parent / 'runs'}"])  # fmt: skip
    text = render([Step("", composed)])
    sizes = Sizes.of(config)
    whole = sizes.weights()
    cpu = rollout_memory(config, composed.settings, gpu_bytes=None)
    assert cpu.weights == 2 * whole
    assert cpu.cache == 2**30
    for name, size in (("engine weights", cpu.weights), ("KV cache", cpu.cache)):
        assert re.search(rf"^  {name} +{in_words(size)}  generate score train$", text, re.M)
    settings = {**composed.settings, "rollout": {
        **composed.settings["rollout"], "tensor_parallel": 8, "gpu_memory": 0.5}}  # fmt: skip
    gpu = rollout_memory(config, settings, gpu_bytes=80 * 2**30)
    assert gpu.weights == 2 * whole // 8
    assert gpu.weights + gpu.cache + LIBRARIES == 40 * 2**30
    assert gpu.token * 8 == sizes.kv_cache(1)


def test_the_preflight_refuses_it_in_the_same_words(large: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check([Step("", composed_of(large))])
    details = "\n".join(caught.value.details)
    assert "memory: " in details
    assert "peft=lora" in details
    assert "smoke.kv_cache_gib=2 or smoke.max_model_len=3200" in details


def test_ranks_that_share_rows_need_fewer_activations(large: Path) -> None:
    def activations(*overrides: str) -> tuple[float, str]:
        composed = composed_of(large, "peft=lora", "train.nproc=4", "train.device=cpu", *overrides)
        text = render([Step("chain", composed)])
        return float(re.search(r" activations +([\d.]+) GiB", text)[1]), text

    whole, _ = activations()
    part, text = activations("train.sequence_parallel=4")
    assert whole / 4 <= part < whole / 3  # a cast weight's share does not fall
    assert "a rank has 1/4 of a row's tokens (train.sequence_parallel)" in text
    assert "x 1 group of 4 ranks x" in text


def test_a_model_on_the_hub_is_estimated_from_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the program, against a Hub on loopback: documents are downloaded, and no weights."""
    arguments = ["+exp=sft_qlora", "model=hf", "model.path=me/model", "plan=true"]
    arguments += ["data=jsonl", "data.path=rows.jsonl", "train.nproc=8", "train.device=cpu"]
    arguments += [f"paths.runs={tmp_path / 'runs'}"]
    env = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def planned(*more: str) -> str:
        return next(
            line for line in program(tmp_path, *arguments, *more).stdout.splitlines()
            if line.startswith("memory a rank: ")
        )  # fmt: skip

    with hub_on_loopback() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert planned().endswith("me/model has no config.json; another model.path")
        hub.files["config.json"] = json.dumps(QWEN_72B).encode()
        for flag, reason in (("gated", "me/model is gated; ask for"), ("down", "the Hub failed (")):
            setattr(hub, flag, True)
            assert f"in the Hugging Face cache: {reason}" in planned()
            setattr(hub, flag, False)
        refused = planned("model.revision=v9")
        assert refused.endswith("me/model has no revision v9; another model.revision")
        refused = planned("model.path=me/other")
        assert "no model me/other for this token; another model.path, or hf auth" in refused

        documents = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
        hub.files |= dict.fromkeys(documents, b"{}")
        hub.asked.clear()
        assert peak_gib(planned()) > 40  # 72 B parameters in 4 bits
        assert {request.rpartition("/")[2] for request in hub.asked} == {"config.json", *documents}
        asked = len(hub.asked)
        assert peak_gib(planned()) > 40
        assert len(hub.asked) == asked, "the cache has it"
