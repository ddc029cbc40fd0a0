"""Layouts of checkpoints on the Hub that `save_pretrained` does not write today."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ContractError
from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.families.merging import plan_merge
from tasks.weights.files.header import TensorInfo, read_header
from tasks.weights.plan.contracts import ModelFacts, model_facts
from tests.weights.families.making import load, merged_by_peft, save_adapter, save_base
from tests.weights.families.test_families import merge
from tests.weights.making import state_of

Rename = Callable[[str], str]


def _sub(pattern: str, to: str) -> Rename:
    return lambda key: re.sub(pattern, to, key)


def relabel(base: Path, folder: Path, rename: Rename) -> Path:
    """Copy a checkpoint with other keys."""
    shutil.copytree(base, folder)
    state = {rename(key): tensor for key, tensor in state_of(base).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


OTHERS: dict[str, tuple[str, Rename]] = {
    "gpt2-without-prefix": ("gpt2", _sub(r"^transformer\.", "")),
    "llama-without-prefix": ("llama", _sub(r"^model\.", "")),
    "neox-as-in-memory": ("gpt_neox", _sub(r"^embed_out\.", "lm_head.")),
    "mixtral-renamed-only": ("mixtral", _sub(r"block_sparse_moe", "mlp")),
    "qwen2_5_vl-as-in-memory": (
        "qwen2_5_vl",
        lambda key: re.sub(
            r"^visual", "model.visual", re.sub(r"^model\.", "model.language_model.", key)
        ),
    ),
    "gemma3-as-on-the-hub": ("gemma3", _sub(r"^vision_tower\.", "vision_tower.vision_model.")),
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
    relabelled = relabel(base, tmp_path / "other", rename)
    merge(base, adapter, tmp_path / "out")
    merge(relabelled, adapter, tmp_path / "other-out")
    wanted, actual = state_of(tmp_path / "out"), state_of(tmp_path / "other-out")
    assert set(actual) == {rename(key) for key in wanted} != set(wanted)
    assert all(torch.equal(actual[rename(key)], tensor) for key, tensor in wanted.items())
    load(tmp_path / "other-out")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_that_are_fused_on_disk_stay_fused(tmp_path: Path, family: str) -> None:
    base = save_base(tmp_path / "base", family, tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, family)
    shutil.copytree(base, tmp_path / "fused")
    state = {key: tensor.contiguous() for key, tensor in load(base).state_dict().items()}
    save_file(state, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    plan = merge(tmp_path / "fused", adapter, tmp_path / "out")
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


def _planned(base: Path, adapter: Path, change: Callable[[dict[str, TensorInfo]], None]) -> None:
    """Plan a merge with a base whose header was changed."""
    header = dict(read_header(base / "model.safetensors").tensors)
    change(header)
    facts: ModelFacts = model_facts(base, disk={key: info.shape for key, info in header.items()})
    lora = read_adapter(adapter)
    operands = {f"adapter:{key}": info for key, info in lora.tensors.tensors.items()}
    plan_merge(header, facts, changes([(lora, 1.0)], facts.live), operands)


def _drop(pattern: str) -> Callable[[dict[str, TensorInfo]], None]:
    def change(header: dict[str, TensorInfo]) -> None:
        for key in [key for key in header if re.search(pattern, key)]:
            del header[key]

    return change


def _enter(key: str, shape: tuple[int, ...], dtype: str = "BF16"):
    def change(header: dict[str, TensorInfo]) -> None:
        header[key] = TensorInfo(shape, dtype, 0, 0)

    return change


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (_drop(r"layers\.1\..*experts\.2\.w3"), f"{EXPERT}: missing"),
        (_drop(r"layers\.1\."), r"model.layers.1.self_attn.q_proj.weight: missing, \[32, 32\]"),
        (_enter(EXPERT, (48, 31)), r"gate_up_proj: cannot join .*48, 32\], .*w3.weight \[48, 31\]"),
        (_enter("model.norm.weight", (31,)), r"norm.weight: the model has \[32\], .* make \[31\]"),
        (_enter("model.layers.1.norm.weight", (32,)), "no place for it; near: model.layers.1."),
        (_enter("model.layers.2.mlp.gate.weight", (4, 32)), "layers.2.* no place for it"),
        (_enter("model.layers.1.self_attn.q_proj.weight", (32, 32), "I8"), r"I8 \[32, 32\] is no"),
    ],
)  # fmt: skip
def test_a_base_that_does_not_fit_is_refused_by_name(tmp_path, mixtral, change, finding) -> None:
    base, adapter = mixtral
    with pytest.raises(ContractError) as raised:
        _planned(base, adapter, change)
    assert re.search(finding, raised.value.report())


def test_all_findings_come_in_one_error(mixtral) -> None:
    base, adapter = mixtral

    def change(header: dict[str, TensorInfo]) -> None:
        _drop(r"layers\.0\.self_attn")(header)
        _enter("stray", (3,))(header)

    with pytest.raises(ContractError) as raised:
        _planned(base, adapter, change)
    assert len([finding for finding in raised.value.details if ": missing" in finding]) == 4
    assert any(finding.startswith("stray: ") for finding in raised.value.details)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixtral")
    base = save_base(folder / "base", "mixtral", tied=False)
    return base, save_adapter(folder / "adapter", base, "mixtral")
