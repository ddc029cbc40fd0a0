"""Weight sync: merged tensors, folders in memory, refusals, sampling, decisions about servers."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tasks.core.errors import ConfigError, ContractError, TrainingError
from tasks.rl import models
from tasks.rl.rollout.policy import PREFIX, memory_folder, merged_tensors, sweep
from tasks.rl.rollout.proof import PROBES, Numbers, SyncProof
from tasks.rl.settings import goes_as_adapter, unservable
from tasks.rollout_base import rollout_base
from tasks.serving.vllm.colocation import room_for_rank
from tasks.training.job import Peft
from tasks.training.model.build import lora_config
from tasks.weights.model import Model, facts_of, perform
from tests.rl.making import alone
from tests.settings import Rollout, Settings
from tests.tiny import tiny

LORA = Peft("lora", rank=4, alpha=6)


def adapted(peft: Peft, new_ids: tuple[int, ...] = (), **sizes: Any) -> tuple[Any, Model]:
    """A model with a trained adapter in fp32, and the facts of its base."""
    import transformers
    from peft import get_peft_model

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(tiny("Qwen2", **sizes))
    facts = facts_of(model)
    if peft.kind == "none":
        return model, facts
    config = lora_config(peft, head="tokens", model=model)
    if new_ids:
        config.trainable_token_indices = {"embed_tokens": list(new_ids)}
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model, facts


@pytest.mark.parametrize(
    ("peft", "tied", "new_ids"),
    [
        (replace(LORA, use_rslora=True, rank_pattern={"q_proj": 2}), True, ()),
        (replace(LORA, use_dora=True, target_modules=("q_proj", "v_proj")), False, ()),
        (Peft(), True, ()),
        (replace(LORA, modules_to_save=("lm_head", "norm")), False, ()),
        (replace(LORA, target_modules=("q_proj", "embed_tokens")), False, ()),
        (replace(LORA, target_modules=("q_proj",)), True, (3, 5)),
    ],
    ids=["patterns", "dora", "full", "modules", "embedding", "rows"],
)
def test_merged_tensors_equal_those_of_peft(
    peft: Peft, tied: bool, new_ids: tuple[int, ...]
) -> None:
    model, facts = adapted(peft, new_ids, tie_word_embeddings=tied)
    actual = {key: tensor.clone() for key, tensor in merged_tensors(model, facts)}
    merged = model if peft.kind == "none" else model.merge_and_unload()
    wanted = dict(merged.state_dict())
    assert set(actual) == set(wanted), "a tied head among them, under its own key"
    for key, tensor in wanted.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-6, atol=1e-6)


def test_experts_are_synced_one_by_one_as_they_are_stored(tmp_path: Path) -> None:
    """In memory they are one tensor a layer. Of an adapter beside them nothing is left out."""
    import transformers
    from peft import get_peft_model

    config = tiny("Qwen3Moe", moe_intermediate_size=24, num_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    actual, wanted = (
        dict(merged_tensors(model, facts_of(model))),
        load_file(tmp_path / "model.safetensors"),
    )
    assert actual.keys() == wanted.keys()
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in actual
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    facts, dora = facts_of(model), replace(LORA, use_dora=True, target_modules=("q_proj",))
    adapter = get_peft_model(model, lora_config(dora, head="tokens", model=model))
    with pytest.raises(ConfigError, match=r"experts\.0\."):
        list(merged_tensors(adapter, facts))


def test_a_missing_tensor_is_named() -> None:
    model, facts = adapted(Peft())
    del model.model.layers[1].mlp.up_proj._parameters["weight"]
    with pytest.raises(ContractError, match=r"layers\.1\.mlp\.up_proj\.weight.*missing"):
        list(merged_tensors(model, facts))


def test_folders_in_memory_are_deleted_and_those_of_dead_processes_too(tmp_path: Path) -> None:
    dead, alive = tmp_path / f"{PREFIX}4194305-x", tmp_path / f"{PREFIX}{os.getpid()}-x"
    unrelated = tmp_path / "something-else"
    for path in (dead, alive, unrelated):
        path.mkdir()
    sweep(tmp_path)
    assert not dead.exists(), "no process can have this number"
    assert alive.exists()
    assert unrelated.exists()
    seen: list[Path] = []

    def broken_off() -> None:
        with memory_folder(alone(), 10) as folder:  # type: ignore[arg-type]
            (folder / "adapter_model.safetensors").write_bytes(b"x")
            seen.append(folder)
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        broken_off()
    assert not seen[0].exists()


def test_policies_that_vllm_cannot_serve_are_refused() -> None:
    warm, usual = Rollout(temperature=0.7, top_p=0.9), Rollout()
    dora = Settings(peft=replace(LORA, use_dora=True, target_modules=("embed_tokens",)))
    for settings, rollout, named in (
        (Settings(), warm, "rollout.temperature: 0.7"),
        (dora, usual, "embed_tokens"),
    ):
        assert any(named in str(problem) for problem in unservable(settings, rollout))
    for settings, as_adapter in (
        (Settings(peft=replace(LORA, rank=512)), True),
        (Settings(peft=replace(LORA, rank=1024)), False),
        (Settings(peft=replace(LORA, use_dora=True)), False),
        (Settings(peft=replace(LORA, modules_to_save=("lm_head",))), False),
        (Settings(peft=LORA, new_tokens=("<a>",)), False),
        (Settings(peft=Peft("qlora", target_modules=("embed_tokens",))), False),
    ):
        assert goes_as_adapter(settings) == as_adapter, settings
    assert [room_for_rank(rank) for rank in (1, 9, 300)] == [8, 16, 320]


def test_values_equal_those_of_the_loaded_layers(tmp_path: Path) -> None:
    import transformers
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base, folder = tmp_path / "base", tmp_path / "dequantised"
    folder.mkdir()
    # Rows are whole blocks of 64: of others bitsandbytes' own kernel for CPUs takes wrong scales.
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(tiny("Qwen2", hidden_size=64, intermediate_size=128))
    model.to(torch.bfloat16).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")  # a base has one; it is copied as it is
    quantization = Peft(kind="qlora").quantization("bfloat16")
    assert quantization is not None
    log = logging.getLogger(__name__)
    rollout_base(
        folder, base=base, quantization=quantization, dtype="bfloat16", perform=perform, log=log
    )
    tensors = load_file(folder / "model.safetensors")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    packed = 0
    for name, parameter in loaded.named_parameters():
        state = getattr(parameter, "quant_state", None)
        value = parameter if state is None else dequantize_4bit(parameter.data, state)
        packed += state is not None
        assert torch.equal(tensors.pop(name), value), name
    assert packed == 14
    assert tensors == {}
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    beside = {"generation_config.json", "tokenizer.json"}
    assert {path.name for path in folder.iterdir()} == beside | {"config.json", "model.safetensors"}


URL = "http://127.0.0.1:8000"
SIZE = 6 * PROBES
"""Numbers of responses of six tokens, the same of all servers."""


def measured(
    draw: np.random.Generator, *, step: float, noise: float, share: float, repeat: float = 0.0
) -> tuple[SyncProof, Numbers, Numbers]:
    """Return the proof of the last sync, and trainer's and server's scores of this one.

    The policy moves by `step` nats per token, the server by a share of it; `noise` is between both
    at the same version, `repeat` between two measurements of the same server.
    """
    before = -np.abs(draw.normal(2, 1, SIZE))
    apart, moved = draw.normal(0, noise, SIZE), draw.normal(0, step, SIZE)
    proof = SyncProof(0.1)
    proof.remember([], before, {URL: before + apart})
    server = before + apart + share * moved + draw.normal(0, repeat, SIZE)
    return proof, before + moved, server


def test_only_servers_with_the_old_version_are_refused() -> None:
    sizes = [(step, noise) for step in (1e-4, 1e-2, 0.05) for noise in (1e-4, 2e-3, 1e-2)]
    for step, noise in sizes:
        for seed in range(20):
            draw, sampled = np.random.default_rng(seed), {"step": step, "noise": noise}
            proof, trainer, server = measured(draw, share=1, repeat=noise / 4, **sampled)
            proof.require_moved(2, trainer, {URL: server})
    for step, noise in ((0.012, 0.002), (0.06, 0.01), (0.03, 0.005)):
        for seed in range(20):
            draw, sampled = np.random.default_rng(seed), {"step": step, "noise": noise}
            proof, trainer, server = measured(draw, share=0, repeat=noise / 4, **sampled)
            with pytest.raises(TrainingError, match=URL):
                proof.require_moved(2, trainer, {URL: server})


def test_another_model_temperature_or_nan_is_refused() -> None:
    proof, trainer, server = measured(np.random.default_rng(0), step=0, noise=0.5, share=1)
    with pytest.raises(TrainingError, match=r"rl\.mismatch_limit=0\.1"):
        proof.require_moved(1, trainer, {URL: server})
    proof, trainer, server = measured(np.random.default_rng(0), step=0, noise=0, share=1)
    server[3] = np.nan
    with pytest.raises(TrainingError, match="nan"):
        proof.require_moved(1, trainer, {URL: server})
    trainer = np.full(SIZE, -2.0)
    with pytest.raises(TrainingError, match="version 1"):
        SyncProof(0.1).require_sampled(1, {URL: (trainer * 1.25, trainer)})
    near = {URL: (trainer + 0.004, trainer), "b": (trainer - 0.002, trainer)}
    mismatch = SyncProof(0.1).require_sampled(1, near)
    assert mismatch == pytest.approx(0.003)


def test_dropout_is_switched_off() -> None:
    """`old` is measured without dropout, so a pass in training mode has to give the same."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(tiny("Llama", attention_dropout=0.5)), lora)
    ids = torch.arange(8)[None]
    assert not torch.equal(model.eval()(ids).logits, model.train()(ids).logits)
    assert models.disable_dropout(model)
    assert torch.equal(model.eval()(ids).logits, model.train()(ids).logits)
    assert not models.disable_dropout(model)
