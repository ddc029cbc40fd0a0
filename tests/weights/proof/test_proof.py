"""A merged model is proven tensor by tensor, and every kind of wrong merge is diagnosed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.weights.files.opening import open_model
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.operations import Plan
from tasks.weights.proof.faults import State
from tasks.weights.proof.merge import Proof, prove_merge
from tasks.weights.proof.planning import planned
from tasks.weights.quantized.nf4 import as_trained
from tests.weights.adapters.making import quiet, train
from tests.weights.families.making import FAMILIES, load, make_model
from tests.weights.making import merged

Tensors = dict[str, torch.Tensor]
MODEL, SIZES = "model.safetensors", {"hidden_size": 64, "num_hidden_layers": 3}
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


class Merges:
    """Bases, adapters and peft's merges of them, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def base(self, family: str) -> Path:
        folder = self.root / family / "base"
        if not folder.exists():
            tied = {"tie_word_embeddings": family == "qwen2"}
            with quiet():
                make_model(FAMILIES[family].config(**SIZES, **tied)).save_pretrained(folder)
        return folder

    def adapter(self, family: str, name: str = "plain", **settings: Any) -> Path:
        from peft import LoraConfig

        folder = self.root / family / name
        if not folder.exists():
            config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
            config |= {"task_type": "CAUSAL_LM", **settings}
            wrapped = train(load(self.base(family)), LoraConfig(**config))
            with quiet():
                wrapped.save_pretrained(folder)
        return folder

    def merged(self, family: str, name: str, arithmetic: torch.dtype, stored: torch.dtype) -> Path:
        from peft import PeftModel

        folder = self.root / family / f"{name}-{arithmetic}-{stored}"
        if not folder.exists():
            with quiet():
                model = load(self.base(family), arithmetic)
                model = PeftModel.from_pretrained(model, self.root / family / name)
                model.merge_and_unload().to(stored).save_pretrained(folder)
        return folder


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> Merges:
    return Merges(tmp_path_factory.mktemp("proof"))


def prove(base: Path, adapter: Path, merged: Path, **settings: Any) -> Proof:
    made = planned(base, adapter)
    options = {"any_base": True, "tied": made.tied, **settings}
    return prove_merge(made.plan, made.sources, open_model(merged), **options)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": list(FAMILIES["mixtral"].experts)}


RIGHT: list[tuple[str, str, Mapping[str, Any]]] = [
    ("qwen2", "rslora", {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    ("qwen2", "dora", {"use_dora": True}),
    ("llama", "saved", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", "embeddings", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    ("gpt2", "plain", {}),
    ("mixtral", "plain", EXPERTS),
]


@pytest.mark.parametrize(("family", "name", "settings"), RIGHT)
def test_a_right_merge_is_proven_in_every_arithmetic(
    merges: Merges, family: str, name: str, settings: Mapping[str, Any]
) -> None:
    adapter = merges.adapter(family, name, **settings)
    for arithmetic, stored in ((BF16, BF16), (FP32, BF16), (FP16, FP16), (FP32, FP32)):
        proof = prove(merges.base(family), adapter, merges.merged(family, name, arithmetic, stored))
        assert proof.ok, (arithmetic, stored, proof.faults, proof.scale)
        assert any(verdict.touched for verdict in proof.verdicts)
        assert abs(proof.scale - 1) < 1e-3


@pytest.fixture(scope="module")
def broken(merges: Merges) -> Callable[..., Proof]:
    """Prove a copy of a right merge with some tensors edited."""
    count = iter(range(1000))

    def how(family: str, edit: Callable[[Tensors, Tensors], object]) -> Proof:
        settings = EXPERTS if family == "mixtral" else {}
        adapter = merges.adapter(family, **settings)
        good, folder = merges.merged(family, "plain", FP32, BF16), merges.root / str(next(count))
        shutil.copytree(good, folder)
        tensors, base = load_file(good / MODEL), load_file(merges.base(family) / MODEL)
        edit(tensors, base)
        edited = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(edited, folder / MODEL, metadata={"format": "pt"})
        return prove(merges.base(family), adapter, folder)

    return how


def change(merges: Merges, key: str) -> torch.Tensor:
    """Return `scale * B A` of a tensor of qwen2's plain adapter, computed by torch."""
    lora = load_file(merges.adapter("qwen2") / "adapter_model.safetensors")
    at = f"base_model.model.{key.removesuffix('.weight')}.lora_"
    return 1.5 * lora[f"{at}B.weight"].float() @ lora[f"{at}A.weight"].float()


def projections(tensors: Tensors) -> list[str]:
    return [key for key in tensors if key.endswith("_proj.weight")]


def states(proof: Proof) -> dict[str, State]:
    return {verdict.name: verdict.state for verdict in proof.faults}


def test_modules_left_out_are_named(broken: Callable[..., Proof]) -> None:
    def edit(tensors: Tensors, base: Tensors) -> None:
        tensors.update({key: base[key] for key in projections(base)[::2]})

    proof = broken("qwen2", edit)
    names = projections({verdict.name: torch.empty(0) for verdict in proof.verdicts})[::2]
    assert states(proof) == dict.fromkeys(names, State.LEFT_OUT)


@pytest.mark.parametrize("scale", [2.0, -1.0, 0.98])
def test_a_wrong_scale_is_named_and_measured(
    merges: Merges, broken: Callable[..., Proof], scale: float
) -> None:
    def edit(tensors: Tensors, base: Tensors) -> None:
        for key in projections(base):
            tensors[key] = (base[key].float() + scale * change(merges, key)).bfloat16()

    proof = broken("qwen2", edit)
    state = State.TWICE if scale == 2 else State.SCALED
    assert states(proof) == dict.fromkeys(
        projections(load_file(merges.base("qwen2") / MODEL)), state
    )
    assert [fault.scale for fault in proof.faults] == pytest.approx([scale] * 21, abs=0.004)


def test_a_merge_into_the_dequantised_base_is_recognised(
    merges: Merges, broken: Callable[..., Proof]
) -> None:
    def edit(tensors: Tensors, base: Tensors) -> None:
        for number, key in enumerate(projections(base)):
            seen = as_trained(base[key], {"type": "nf4", "double_quant": True}).float()
            added = {3: 0.0, 4: 1.5}.get(number, 1.0) * change(merges, key)
            tensors[key] = (seen + added).bfloat16()

    proof = broken("qwen2", edit)
    names = projections(load_file(merges.base("qwen2") / MODEL))
    assert [verdict.name for verdict in proof.dequantized] == names
    assert states(proof) == {names[3]: State.LEFT_OUT, names[4]: State.SCALED}
    assert proof.faults[1].scale == pytest.approx(1.5, abs=0.02)


def test_a_transposed_square_is_named(merges: Merges, broken: Callable[..., Proof]) -> None:
    def turned(tensors: Tensors, base: Tensors) -> None:
        tensors[O_PROJ] = (base[O_PROJ].float() + change(merges, O_PROJ).T).bfloat16()

    proof = broken("qwen2", lambda tensors, _: tensors.update({O_PROJ: tensors[O_PROJ].T}))
    assert states(proof) == {O_PROJ: State.TRANSPOSED}
    assert states(broken("qwen2", turned)) == {O_PROJ: State.TRANSPOSED}


def test_a_single_wrong_number_is_found(broken: Callable[..., Proof]) -> None:
    def edit(tensors: Tensors, _: Tensors) -> None:
        tensors[O_PROJ][5, 7] += 0.01 + tensors[O_PROJ][5, 7].abs() / 8
        tensors["model.norm.weight"][3] *= 1.01

    proof = broken("qwen2", edit)
    assert states(proof) == {O_PROJ: State.CHANGED, "model.norm.weight": State.CHANGED}
    assert [fault.sums.beyond for fault in proof.faults if fault.sums] == [1, 1]
    assert [fault.touched for fault in proof.faults] == [True, False]


def test_experts_in_another_order_are_named(broken: Callable[..., Proof]) -> None:
    def edit(tensors: Tensors, _: Tensors) -> None:
        first, second = (f"layers.1.block_sparse_moe.experts.{n}." for n in (0, 2))
        for key in [key for key in tensors if first in key]:
            swapped = key.replace(first, second)
            tensors[key], tensors[swapped] = tensors[swapped], tensors[key]

    proof = broken("mixtral", edit)
    assert {*states(proof).values()} == {State.EXPERT}
    likes = {fault.name: fault.like for fault in proof.faults}
    assert len(likes) == 6
    for name, like in likes.items():
        own, theirs = (re.findall(r"experts\.(\d)", text) for text in (name, like))
        assert {*own, *theirs} == {"0", "2"}


def test_missing_and_extra_tensors_are_named(broken: Callable[..., Proof]) -> None:
    def edit(tensors: Tensors, _: Tensors) -> None:
        tensors["v_head.weight"] = tensors.pop(O_PROJ)

    proof = broken("qwen2", edit)
    assert states(proof) == {O_PROJ: State.MISSING}
    assert proof.extra == ("v_head.weight",)


def test_a_merge_of_ours_is_proven_by_its_plan(
    qwen: Any, qlora_adapter: Path, qlora_run: Path, tmp_path: Path
) -> None:
    for mode in ("dequantized", "original"):
        out = tmp_path / mode
        out.mkdir()
        report = merged(out, qlora_adapter, qwen.path, qlora_run, base_mode=mode)
        sources = {
            "base": read_checkpoint(qwen.path),
            "adapter": read_checkpoint(qlora_adapter, "adapter_model"),
        }
        plan = Plan.from_json(json.loads(json.dumps(report.notes["plan"])))
        proof = prove_merge(plan, sources, read_checkpoint(out))
        assert proof.ok, proof.faults
        assert len(proof.dequantized) == (14 if mode == "dequantized" else 0)
        if mode == "original":
            dequantized = Plan.from_json({**plan.as_json(), "ops": _dequantized(plan)})
            wrong = prove_merge(dequantized, sources, read_checkpoint(out))
            assert {fault.state for fault in wrong.faults} == {State.BASE_MODE}
            assert len(wrong.faults) == 14


def _dequantized(plan: Plan) -> list[Any]:
    ops = plan.as_json()["ops"]
    for op in ops:
        if op["quantization"]:
            op["quantization"] = {**op["quantization"], "base": "dequantized"}
    return ops
