"""A merge on disk equals peft's merge in fp32, cast once, for every feature of an adapter."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.delivery.peers import SAVER, run_peer
from tests.delivery.save_peers import PEFT
from tests.tiny import FAMILIES, random_model, tiny
from tests.weights.making import (
    load,
    merge,
    merged_by_peft,
    quiet,
    rounded_alike,
    save,
    state_of,
    train,
)

Bases = Callable[[str], Path]

ALL, QV = "all-linear", ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 7, "^model.layers.0.mlp.*": 2},
    "alpha_pattern": {"v_proj": 5, r".*\.0\.self_attn\.k_proj": 1.5},
}
EXPERT_PATTERNS = {
    "rank_pattern": {"experts.gate_up_proj": 3, "mlp.experts": 9},
    "alpha_pattern": {r"layers\.1\.mlp\.experts\.down_proj": 9},
}
LLAMA4 = {"intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8, "pad_token_id": 0}
BOTH_ENDS = {"embed_tokens": [1, 2], "lm_head": [1, 2]}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ALL}),
    "patterns": ("llama", {"target_modules": ALL, "use_rslora": True, **PATTERNS}),
    "one layer": ("llama", {"target_modules": QV, "layers_to_transform": 1}),
    "dora": ("llama", {"target_modules": ALL, "use_dora": True}),
    "both embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "conv1d and biases": ("gpt2", {"target_modules": ALL, "bias": "all"}),
    "a head with a bias": ("phi", {"target_modules": ["embed_tokens", "lm_head"]}),
    "fan_in_fan_out of linear": ("llama", {"target_modules": QV, "fan_in_fan_out": True}),
    "biases of targets": ("biased", {"target_modules": ALL, "bias": "lora_only"}),
    "experts": ("mixtral", {"target_modules": QV, "target_parameters": EXPERTS}),
    "patterns of experts": (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": EXPERTS,
            "use_rslora": True,
            **EXPERT_PATTERNS,
        },
    ),
    "experts by their old names": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "transposed experts": (
        "llama4",
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "a matrix by its name": (
        "llama",
        {"target_modules": [], "target_parameters": ["up_proj.weight"]},
    ),
    "saved layers": (
        "llama",
        {"target_modules": QV, "modules_to_save": ["mlp", "norm", "lm_head"]},
    ),
    "token rows": ("llama", {"target_modules": QV, "trainable_token_indices": BOTH_ENDS}),
    "tied token rows": ("qwen2", {"target_modules": QV, "trainable_token_indices": [3, 95, 7]}),
    "tied, rows of both": ("qwen2", {"target_modules": QV, "trainable_token_indices": BOTH_ENDS}),
    "tied, saved together": (
        "qwen2",
        {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied, saved apart": (
        "qwen2",
        {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tied, head saved": ("qwen2", {"target_modules": QV, "modules_to_save": ["lm_head"]}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Return the folder of a family's base, made once."""
    root = tmp_path_factory.mktemp("bases")

    @functools.cache
    def base(name: str) -> Path:
        if name == "llama4":
            config = tiny("Llama4Text", **LLAMA4)
        elif name == "phi":
            config = tiny("Phi", pad_token_id=0)
        elif name == "biased":
            config = FAMILIES["llama"].config(attention_bias=True)
        else:
            config = FAMILIES[name].config(tie_word_embeddings=name == "qwen2")
        random_model(config).save_pretrained(root / name)
        return root / name

    return base


def _adapter(base: Path, folder: Path, *, seed: int = 1, **settings: Any) -> Path:
    """Train and save an adapter of a base."""
    from peft import LoraConfig

    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}
    with quiet():
        return save(train(load(base, torch.float32), LoraConfig(**options), seed=seed), folder)


def _compare(out: Path, theirs: Any, base: Path) -> None:
    """Require equal tensors up to the order of sums, and that something changed."""
    ours, before = state_of(out), state_of(base)
    wanted = theirs.state_dict()
    if any("experts" in name for name in wanted) and set(ours) != set(
        wanted
    ):  # the checkpoint has one tensor per expert
        theirs.save_pretrained(out / "peft")
        wanted = state_of(out / "peft")
    assert set(ours) <= set(wanted)
    missing = set(wanted) - set(ours)
    assert not missing or missing == {"lm_head.weight"} == set(wanted) - set(before)
    assert not [name for name in ours if not rounded_alike(ours[name], wanted[name])]
    assert any(not torch.equal(tensor, ours[name]) for name, tensor in before.items())


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str, bases: Bases, tmp_path: Path) -> None:
    family, settings = FEATURES[feature]
    base = bases(family)
    adapter = _adapter(base, tmp_path / "adapter", **settings)
    merge(base, adapter, tmp_path / "out")
    _compare(tmp_path / "out", merged_by_peft(base, adapter), base)


TIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both, tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "rows and the head": {"target_modules": ["lm_head"], "trainable_token_indices": [4, 5]},
    "other rows": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [4, 5], "lm_head": [6]},
    },
}


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_are_merged_as_trained(case: str, bases: Bases, tmp_path: Path) -> None:
    """Compare with the model before merging: peft's merge changes both ends of a shared tensor."""
    from peft import LoraConfig

    base = bases("qwen2")
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **TIED[case])
    trained = train(load(base, torch.float32), config)
    adapter = save(trained, tmp_path / "adapter")
    plan, _ = merge(base, adapter, tmp_path / "out")
    assert plan.untied == (() if "tied" in case else ("lm_head.weight",))
    merged, ids = load(tmp_path / "out", torch.float32), torch.arange(3, 20)[None]
    with torch.no_grad():
        assert float((merged(ids).logits - trained(ids).logits).abs().max()) < 0.05


def test_rows_of_new_tokens_come_from_the_adapter(bases: Bases, tmp_path: Path) -> None:
    """Embeddings that grew before training are in the adapter; only the head has LoRA on top."""
    from peft import LoraConfig

    base = bases("qwen2")
    grown = copy.deepcopy(load(base, torch.float32))
    with quiet():
        grown.resize_token_embeddings(101, mean_resizing=False)
    with torch.no_grad():
        for tensor in grown.parameters():
            tensor.copy_(tensor.bfloat16().float())
    trained = train(grown, LoraConfig(r=4, lora_alpha=6, target_modules=["lm_head"]))
    adapter = save(trained, tmp_path / "adapter", save_embedding_layers=True)
    plan, _ = merge(base, adapter, tmp_path / "out")
    assert plan.rows == 101
    merged, ids = load(tmp_path / "out", torch.float32), torch.arange(85, 101)[None]
    with torch.no_grad():
        assert float((merged(ids).logits - trained(ids).logits).abs().max()) < 0.05


SLOW_FAMILIES = sorted(set(FAMILIES) - {"phi3", "qwen3_moe", "qwen2_5_vl"})


@pytest.mark.parametrize(
    "family",
    [
        "phi3", "qwen3_moe", "qwen2_5_vl",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES),
    ],
)  # fmt: skip
def test_every_family(family: str, tmp_path: Path) -> None:
    """All linear layers and experts, under the keys of the base; transformers loads the result."""
    entry = FAMILIES[family]
    base = tmp_path / "base"
    random_model(entry.config(tie_word_embeddings=False)).save_pretrained(base)
    settings = {"target_modules": entry.targets, "target_parameters": list(entry.experts) or None}
    adapter = _adapter(base, tmp_path / "adapter", task_type=None, **settings)
    plan, _ = merge(base, adapter, tmp_path / "out")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "peft")
    ours, theirs = state_of(tmp_path / "out"), state_of(tmp_path / "peft")
    assert list(ours) == list(state_of(base))
    assert set(ours) == set(theirs)
    assert sum(bool(op.terms) for op in plan.ops) > len(ours) / 4
    assert not [key for key, tensor in theirs.items() if not rounded_alike(ours[key], tensor)]
    load(tmp_path / "out")


@pytest.mark.peers
@pytest.mark.parametrize("peer", ["peft011", "peft015"])
def test_an_adapter_of_an_older_peft_is_merged_as_by_it_and_by_the_newest(
    peer: str, bases: Bases, tmp_path: Path
) -> None:
    """`PLUMBLINE_PEERS=~/peers tests/delivery/peers.sh "peft011 peft015"` makes them."""
    base = bases("llama")
    run_peer(peer, str(SAVER), "peft", str(base), str(tmp_path), cwd=tmp_path / "work")
    for name in PEFT:
        adapter, out = tmp_path / name, tmp_path / f"{name} out"
        merge(base, adapter, out)
        _compare(out, merged_by_peft(base, adapter), base)
        theirs = {key: tensor.bfloat16() for key, tensor in state_of(adapter / "merged").items()}
        ours = state_of(out)
        assert set(ours) == set(theirs)
        assert not [key for key in ours if not rounded_alike(ours[key], theirs[key])], name
