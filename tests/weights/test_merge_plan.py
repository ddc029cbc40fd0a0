from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tasks.errors import ContractError
from tasks.weights.header import TensorInfo
from tasks.weights.merge_plan import BaseUse, lora_scale, plan_merge
from tasks.weights.plan import Op, Plan
from tasks.weights.terms import LowRank
from tests.weights.making import NF4

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
BASE = {
    "norm.weight": TensorInfo((6,), "BF16", 0, 0),
    "up.weight": TensorInfo((8, 6), "BF16", 0, 0),
    "down.weight": TensorInfo((6, 8), "BF16", 0, 0),
}
UP = "base_model.model.up.lora_{}.weight"
ADAPTER = {
    UP.format("A"): TensorInfo((4, 6), "BF16", 0, 0),
    UP.format("B"): TensorInfo((8, 4), "BF16", 0, 0),
}
USE = BaseUse(frozenset({"up.weight", "down.weight"}), NF4, dequantized=True)


def test_one_operation_a_tensor_in_the_bases_order() -> None:
    plan = plan_merge(BASE, ADAPTER, CONFIG, USE)
    seen = {**NF4, "loaded_dtype": "bfloat16", "base": "dequantized"}
    term = LowRank(f"adapter:{UP.format('A')}", f"adapter:{UP.format('B')}", 2.0)
    assert plan.ops == (
        Op("norm.weight", (6,), "BF16", "base:norm.weight", "BF16"),
        Op("up.weight", (8, 6), "BF16", "base:up.weight", "BF16", quantization=seen, terms=(term,)),
        Op("down.weight", (6, 8), "BF16", "base:down.weight", "BF16", quantization=seen),
    )


def test_into_the_original_base_only_the_error_is_measured() -> None:
    plan = plan_merge(BASE, ADAPTER, CONFIG, replace(USE, dequantized=False))
    assert [op.quantization and op.quantization["base"] for op in plan.ops] == [
        None, "original", None,
    ]  # fmt: skip


def test_a_plan_survives_json() -> None:
    plan = plan_merge(BASE, ADAPTER, {**CONFIG, "use_rslora": True, "r": 4}, USE)
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"up": 20}}, 5.0),
        ({"alpha_pattern": {"p": 20}}, 2.0),
        ({"r": 9, "rank_pattern": {"u.": 4}}, 2.0),
    ],
)
def test_scale(settings: dict, scale: float) -> None:
    plan = plan_merge(BASE, ADAPTER, {**CONFIG, **settings}, BaseUse())
    assert plan.ops[1].terms[0].scale == scale


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"lora_alpha": 0}, "lora_alpha=0 is not a positive number"),
        ({"r": 5}, r"is \[4, 6\], base and rank want \[5, 6\]"),
    ],
)
def test_what_this_merge_cannot_do_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        plan_merge(BASE, ADAPTER, {**CONFIG, **settings}, BaseUse())


def test_an_adapter_of_nothing_is_refused() -> None:
    with pytest.raises(ContractError, match="holds no tensors"):
        plan_merge(BASE, {}, CONFIG, BaseUse())


def test_empty_tensors_are_refused() -> None:
    empty = dict.fromkeys(ADAPTER, TensorInfo((0,), "BF16", 0, 0))
    with pytest.raises(ContractError, match=r"lora_A.weight: is \[0\], base and rank want"):
        plan_merge(BASE, empty, CONFIG, BaseUse())


def test_a_key_of_another_kind_is_refused() -> None:
    extra = {**ADAPTER, "base_model.model.up.lora_magnitude_vector": TensorInfo((8,), "F32", 0, 0)}
    with pytest.raises(ContractError, match="no LoRA weight this merge knows"):
        plan_merge(BASE, extra, CONFIG, BaseUse())


def test_a_vector_cannot_be_a_target() -> None:
    keys = {k.replace("up", "norm"): v for k, v in ADAPTER.items()}
    with pytest.raises(ContractError, match="is no float matrix"):
        plan_merge(BASE, keys, CONFIG, BaseUse())


def test_scales() -> None:
    assert lora_scale(64, 64, rslora=False) == 1.0
    assert lora_scale(64, 64, rslora=True) == 8.0
