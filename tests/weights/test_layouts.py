"""Layouts on the Hub that save_pretrained does not write today; tensors fused in memory or on disk.

transformers 4 is not installed. To peft its models were trees of linear layers under the names of
the checkpoint. So the reference is such a tree of real modules, which peft itself wraps, trains,
saves and merges.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tasks.core.errors import ContractError
from tasks.weights.files.reader import WEIGHTS, read_checkpoint, read_header
from tasks.weights.files.tensors import Tensor
from tasks.weights.gather import plan_full
from tasks.weights.lora import changes, read_adapter
from tasks.weights.merge import plan_merge
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import as_is, with_output
from tasks.weights.shards import read_partitions
from tasks.weights.write import write
from tests.tiny import DEEPSEEK, FAMILIES, Family, random_model
from tests.tiny import FAMILY_SIZES as SIZES
from tests.weights.making import (
    Spread,
    load,
    merge,
    merged_by_peft,
    rounded_alike,
    save,
    save_adapter,
    save_base,
    state_of,
    train,
    write_shards,
)

Rename = Callable[[str], str]
Change = Callable[[dict[str, Tensor]], None]


def _sub(pattern: str, to: str) -> Rename:
    return lambda key: re.sub(pattern, to, key)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixtral")
    base = save_base(folder / "base", "mixtral", tied=False)
    return base, save_adapter(folder / "adapter", base, "mixtral")


OTHERS: dict[str, tuple[str, Rename]] = {
    "gpt2-without-prefix": ("gpt2", _sub(r"^transformer\.", "")),
    "gemma3-as-in-memory": (
        "gemma3",
        lambda key: re.sub(
            r"^(vision_tower|multi_modal)", r"model.\1",
            re.sub(r"^language_model\.model\.", "model.language_model.",
                   re.sub(r"^language_model\.lm_head", "lm_head", key)),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_keys_on_disk_decide_and_are_kept(tmp_path: Path, case: str) -> None:
    family, rename = OTHERS[case]
    base = save_base(tmp_path / "base", family, tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, family)
    relabelled = Path(shutil.copytree(base, tmp_path / "other"))
    state = {rename(key): tensor for key, tensor in state_of(base).items()}
    save_file(state, relabelled / "model.safetensors", metadata={"format": "pt"})
    merge(base, adapter, tmp_path / "out")
    merge(relabelled, adapter, tmp_path / "other-out")
    wanted, actual = state_of(tmp_path / "out"), state_of(tmp_path / "other-out")
    assert set(actual) == {rename(key) for key in wanted} != set(wanted)
    assert all(torch.equal(actual[rename(key)], tensor) for key, tensor in wanted.items())
    load(tmp_path / "other-out")


def test_experts_that_are_fused_on_disk_stay_fused(mixtral, tmp_path: Path) -> None:
    base, adapter = mixtral
    shutil.copytree(base, tmp_path / "fused")
    state = {key: tensor.contiguous() for key, tensor in load(base).state_dict().items()}
    save_file(state, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    plan, _ = merge(tmp_path / "fused", adapter, tmp_path / "out")
    experts = [op for op in plan.ops if op.name.endswith("experts.gate_up_proj")]
    assert experts
    assert all(len(op.shape) == 3 and op.terms for op in experts)
    wanted, actual = merged_by_peft(base, adapter).state_dict(), state_of(tmp_path / "out")
    assert set(actual) == set(wanted)
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    load(tmp_path / "out")


def test_tensors_that_the_model_ignores_are_copied(tmp_path: Path) -> None:
    """DeepSeek-V3 has a draft layer after the last one, which transformers ignores."""
    base = save_base(tmp_path / "base", "deepseek_v3", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, "deepseek_v3")
    state = state_of(base)
    extra = {"model.layers.61.eh_proj.weight": torch.ones(3, 2)}
    extra["model.rotary_emb.inv_freq"] = torch.ones(4)
    save_file({**state, **extra}, base / "model.safetensors", metadata={"format": "pt"})
    assert set(model_facts(base).unread) == set(extra)
    merge(base, adapter, tmp_path / "out")
    merged = state_of(tmp_path / "out")
    assert set(merged) == {*state, *extra}
    assert all(torch.equal(merged[key], tensor) for key, tensor in extra.items())


def test_tensors_whose_elements_loading_mixes_are_copied(tmp_path: Path) -> None:
    """Kimi K2.5 permutes the queries and keys of its vision tower."""
    from peft import LoraConfig
    from transformers import Kimi_K25Config

    text = {**SIZES, **DEEPSEEK, "model_type": "deepseek_v3"}
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4,
    }  # fmt: skip
    config = Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=64,
        tie_word_embeddings=False, image_token_id=93, video_token_id=94,
        vision_start_token_id=91, vision_end_token_id=92,
    )  # fmt: skip
    base = tmp_path / "base"
    random_model(config).save_pretrained(base)
    language, vision_too = r".*language_model.*(o_proj|up_proj)", r".*(o_proj|attn\.k_proj)"
    good = save(train(load(base), LoraConfig(r=3, target_modules=language)), tmp_path / "good")
    plan, _ = merge(base, good, tmp_path / "out")
    wanted = merged_by_peft(base, good).state_dict()
    actual = {key: tensor.bfloat16() for key, tensor in load(tmp_path / "out").state_dict().items()}
    assert not [key for key, tensor in wanted.items() if not rounded_alike(actual[key], tensor)]
    assert any(op.terms for op in plan.ops)
    bad = save(train(load(base), LoraConfig(r=3, target_modules=vision_too)), tmp_path / "bad")
    assert "attn.k_proj.weight: changed" in _findings(base, bad, tmp_path / "bad-out")[0]


def _planned(base: Path, adapter: Path, change: Change) -> None:
    """Plan a merge with a base whose header was changed."""
    header = dict(read_header(base / "model.safetensors").tensors)
    change(header)
    facts: Model = model_facts(base, disk={key: info.shape for key, info in header.items()})
    plan_merge(header, facts, changes(read_adapter(adapter), facts))


def _drop(pattern: str) -> Change:
    def change(header: dict[str, Tensor]) -> None:
        for key in [key for key in header if re.search(pattern, key)]:
            del header[key]

    return change


def _enter(key: str, shape: tuple[int, ...], dtype: str = "BF16"):
    def change(header: dict[str, Tensor]) -> None:
        header[key] = Tensor(shape, dtype)

    return change


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


Q1, NORM1 = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.norm.weight"
MISFITS: list[tuple[Change, str]] = [
    (_drop(r"layers\.1\..*experts\.2\.w3"), f"{EXPERT}: missing"),
    (_enter(EXPERT, (48, 31)), "[48, 31]"),
    (_enter(NORM1, (32,)), NORM1),
    (_enter("model.layers.2.mlp.gate.weight", (4, 32)), "layers.2."),
    (_enter(Q1, (32, 32), "I8"), "I8 [32, 32]"),
]


def test_a_base_that_does_not_fit_is_refused_by_name(mixtral) -> None:
    base, adapter = mixtral
    for change, thing in MISFITS:
        with pytest.raises(ContractError) as raised:
            _planned(base, adapter, change)
        assert thing in raised.value.report()


def test_a_saved_module_replaces_every_part_that_is_stored(tmp_path: Path) -> None:
    """`modules_to_save` on experts: one fused tensor in the adapter, twelve tensors on disk."""
    base = save_base(tmp_path / "base", "qwen3_moe", tied=False)
    settings = {"target_parameters": None, "modules_to_save": ["experts", "norm"]}
    adapter = save_adapter(
        tmp_path / "adapter", base, "qwen3_moe", target_modules=["q_proj"], **settings
    )
    merge(base, adapter, tmp_path / "out")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "peft")
    ours, theirs = state_of(tmp_path / "out"), state_of(tmp_path / "peft")
    assert not [key for key, tensor in ours.items() if not torch.equal(tensor, theirs[key])]


@pytest.mark.parametrize("whole", [False, True], ids=["pair", "whole embedding"])
def test_a_stored_copy_of_a_tied_head_changes_with_the_embedding(tmp_path, whole) -> None:
    base = save_base(tmp_path / "base", "qwen2", tied=True)
    state = state_of(base)
    embedding = state["model.embed_tokens.weight"]
    copied = {**state, "lm_head.weight": embedding.clone()}
    save_file(copied, base / "model.safetensors", metadata={"format": "pt"})
    targets = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", base, "qwen2", **targets)
    tensors = state_of(adapter, "adapter_model")  # peft adds the embedding as it was
    pairs = {key: x for key, x in tensors.items() if whole or "base_layer" not in key}
    save_file(pairs, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    merge(base, adapter, tmp_path / "out")
    merged = state_of(tmp_path / "out")
    assert not torch.equal(merged["model.embed_tokens.weight"], embedding)
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_tensors_that_a_class_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    """A router's bias in bf16 sends tokens to other experts."""
    base = save_base(tmp_path / "base", "deepseek_v3", tied=False)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    state = state_of(base)
    state[bias] = torch.linspace(7, 8, state[bias].numel())
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    source, wide = read_checkpoint(base), model_facts(base).wide
    assert wide == {bias}
    plan = with_output(as_is(source), source, dtype="BF16", max_shard_bytes=10**9, wide=wide)
    (tmp_path / "out").mkdir()
    write(plan, {WEIGHTS: source}, tmp_path / "out", workers=1)
    served = state_of(tmp_path / "out")
    assert torch.equal(served.pop(bias), state[bias])
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "deepseek_v3"])
def test_shards_of_live_tensors_become_the_checkpoint_they_came_from(
    tmp_path: Path, family: str
) -> None:
    base = save_base(tmp_path / "base", family, tied=family == "qwen2")
    trained = load(base)
    live = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    write_shards(tmp_path, live, Spread(world_size=3, full=True))
    parts = read_partitions(tmp_path)
    (tmp_path / "out").mkdir()
    weights = read_checkpoint(base)
    plan = plan_full(parts.tensors, model_facts(base), base=weights)
    used = {op.input for op in plan.ops}
    sources = {"trained": parts.tensors, **({"base": weights} if "base" in used else {})}
    write(plan, sources, tmp_path / "out", workers=1)
    wanted, actual = state_of(base), state_of(tmp_path / "out")
    assert list(actual) == list(wanted)
    assert all(torch.equal(actual[key], tensor) for key, tensor in wanted.items())
    # The one buffer among them, which no optimiser holds.
    bias = ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert [op.name for op in plan.ops if op.input == "base"] == (
        bias if family == "deepseek_v3" else []
    )


MIXTRAL, QWEN = ["w1", "w2", "w3"], ["gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"w2": 2, r".*experts\.1\.w3": 5},
    "alpha_pattern": {r"layers\.0\..*w1": 11},
    "layers_to_transform": [0],
}
FUSED_DORA = ["shared_experts.gate_proj", "experts.1.w1", "k_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"target_modules": [*MIXTRAL, "q_proj", "gate"], "use_rslora": True}),
    "mixtral, patterns": ("mixtral", {"target_modules": MIXTRAL, **PATTERNS}),
    "mixtral, saved": (
        "mixtral",
        {"target_modules": ["w1"], "modules_to_save": ["gate", "experts.2.w2", "lm_head"]},
    ),
    "minimax_m3": ("minimax_m3", {"target_modules": FUSED_DORA, "use_dora": True}),
}


def _minimax_m3(**changes: Any) -> Any:
    from transformers import MiniMaxM3VLConfig

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {
        **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "shared_intermediate_size": 24, "rotary_dim": 8,
    }  # fmt: skip
    return MiniMaxM3VLConfig(text_config=text, vision_config=vision, **changes)


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3 fuses gate and up of a dense layer in memory."""
    monkeypatch.setitem(FAMILIES, "minimax_m3", Family(_minimax_m3))


def _module(name: str, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Make a linear layer of a matrix, an embedding, or a module that only has the tensors."""
    weight = tensors.get("weight")
    if weight is None or weight.ndim != 2 or not set(tensors) <= {"weight", "bias"}:
        other = nn.Module()
        for leaf, tensor in tensors.items():
            other.register_parameter(leaf, nn.Parameter(tensor))
        return other
    if "embed" in name:
        return nn.Embedding.from_pretrained(weight)
    layer = nn.Linear(*reversed(weight.shape), bias="bias" in tensors)
    layer.load_state_dict(tensors)
    return layer


def _tree(state: dict[str, torch.Tensor]) -> nn.Module:
    """Make modules under the names of a checkpoint."""
    root = nn.Module()
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        module, _, leaf = key.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor.float()
    for name, tensors in sorted(modules.items(), key=lambda item: item[0].count(".")):
        *parents, last = name.split(".")
        at = root
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        at.add_module(last, _module(name, tensors))
    return root


def _train(base: Path, folder: Path, **settings: Any) -> nn.Module:
    """Train and save an adapter of the tree of a base. Return that tree."""
    from peft import LoraConfig

    model = _tree(state_of(base))
    save(train(model, LoraConfig(r=3, lora_alpha=5, **settings)), folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_each_layer_of_the_checkpoint_is_merged_as_peft_does(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = save_base(tmp_path / "base", family, tied=False)
    model = _train(base, tmp_path / "adapter", **settings)
    merge(base, tmp_path / "adapter", tmp_path / "out")
    ours = state_of(tmp_path / "out")
    theirs = merged_by_peft(model, tmp_path / "adapter").state_dict()
    assert list(ours) == list(state_of(base))
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not rounded_alike(ours[key], tensor)]
    assert any(not torch.equal(tensor, ours[key]) for key, tensor in state_of(base).items())
    load(tmp_path / "out")


@pytest.mark.parametrize("dora", [False, True])
def test_a_pair_on_a_layer_fused_in_memory_is_cut_into_rows(dora: bool, tmp_path: Path) -> None:
    """Includes DoRA, whose norms are those of single rows."""
    base = save_base(tmp_path / "base", "minimax_m3", tied=False)
    targets = {"target_modules": ["gate_up_proj", "down_proj", "q_proj"], "use_dora": dora}
    adapter = save_adapter(tmp_path / "adapter", base, "minimax_m3", **targets)
    plan, _ = merge(base, adapter, tmp_path / "out")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "peft")
    ours, theirs = state_of(tmp_path / "out"), state_of(tmp_path / "peft")
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not rounded_alike(ours[key], tensor)]
    shared = "language_model.model.layers.1.block_sparse_moe.shared_experts"
    (term,) = next(op for op in plan.ops if op.name == f"{shared}.up_proj.weight").terms
    assert (bool(term.magnitude), term.out_start) == (dora, 24)


def _findings(base: Path, adapter: Path, out: Path) -> list[str]:
    with pytest.raises(ContractError) as raised:
        merge(base, adapter, out)
    return list(raised.value.details)


def test_layers_that_cannot_be_merged_are_refused_by_name(tmp_path: Path) -> None:
    vision = save_base(tmp_path / "vl", "qwen2_5_vl", tied=False)
    targets = r".*(patch_embed\.proj|q_proj)"
    adapter = save_adapter(tmp_path / "b", vision, "qwen2_5_vl", target_modules=targets)
    findings = _findings(vision, adapter, tmp_path / "out")
    assert any("visual.patch_embed.proj: " in line for line in findings)

    mixtral = save_base(tmp_path / "mixtral", "mixtral", tied=False)
    _train(mixtral, tmp_path / "c", target_modules=MIXTRAL)
    shutil.copytree(mixtral, tmp_path / "fused")
    stacks = {key: tensor.contiguous() for key, tensor in load(mixtral).state_dict().items()}
    save_file(stacks, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    assert len(_findings(tmp_path / "fused", tmp_path / "c", tmp_path / "out")) == 4

    state = state_of(tmp_path / "c", "adapter_model")
    key = next(key for key in state if "layers.1" in key and "experts.2.w3.lora_B" in key)
    del state[key]
    save_file(state, tmp_path / "c" / "adapter_model.safetensors", metadata={"format": "pt"})
    findings = _findings(mixtral, tmp_path / "c", tmp_path / "out")
    assert any(f"{key}: missing" in finding for finding in findings)
