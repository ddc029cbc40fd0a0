"""Weights packed in another way, or damaged, are refused with their names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.config.checks import model as preflight
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.quantized.packed import LEVELS, STATE
from tasks.weights.quantized.source import read_base
from tests.weights.quantized.making import Q_PROJ, SAID, STATE_KEY, alter, drop, put, restate

MUTATIONS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no scales": (drop(".absmax"), "absmax absent"),
    "no values": (drop(".quant_map"), "quant_map absent"),
    "no scales of scales": (drop(".nested_absmax"), "nested_absmax absent"),
    "no table of scales": (drop(".nested_quant_map"), "nested_quant_map absent"),
    "no state": (drop(STATE_KEY), "quant_state.* is none"),
    "no matrix": (drop(""), "absent, though .absmax"),
    "matrix alone": (
        drop(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE_KEY),
        "U8 [2048, 1] without .absmax",
    ),
    "short matrix": (
        put("", torch.zeros(2047, 1, dtype=torch.uint8)),
        "packed numbers of 2047 bytes, the shape needs 2048",
    ),
    "short scales": (
        put(".absmax", torch.zeros(63, dtype=torch.uint8)),
        "absmax is U8 [63], U8 [64] is needed",
    ),
    "plain scales": (put(".absmax", torch.zeros(64)), "absmax is F32 [64], U8 [64] is needed"),
    "short table": (put(".nested_quant_map", torch.zeros(255)), "nested_quant_map is F32 [255]"),
    "other values": (
        put(".quant_map", torch.tensor(LEVELS["fp4"])),
        "quant_map does not hold the values of nf4",
    ),
    "no JSON": (put(STATE_KEY, torch.full((9,), 91, dtype=torch.uint8)), "not readable"),
    "a list": (put(STATE_KEY, torch.tensor([91, 93], dtype=torch.uint8)), "not readable"),
    "two states": (
        put(STATE + "bitsandbytes__fp4", torch.zeros(4, dtype=torch.uint8)),
        "bitsandbytes__nf4, bitsandbytes__fp4",
    ),
    "another type": (restate(quant_type="fp4"), "says quant_type 'fp4'"),
    "another shape": (restate(shape=[64, 32]), "packed numbers of 2048 bytes"),
    "no shape": (restate(shape=None), "shape None is not a list"),
    "empty shape": (restate(shape=[0, 64]), "shape [0, 64] is not a list"),
    "unknown block size": (restate(blocksize=48), "blocksize 48 is not one of 32, 64"),
    "fraction": (restate(blocksize=64.0), "blocksize 64.0 is not one of"),
    "another block size": (restate(blocksize=128), "absmax is U8 [64], U8 [32] is needed"),
    "unknown dtype": (restate(dtype="float8"), "dtype 'float8' is not one of"),
    "not nested": (restate(nested_blocksize=None), "nested_absmax without nested_blocksize"),
    "no offset": (restate(nested_offset=None), "nested_offset None is not a finite number"),
    "infinite offset": (restate(nested_offset=float("inf")), "nested_offset inf is not a finite"),
    "bf16 scales": (restate(nested_dtype="bfloat16"), "only float32 is supported"),
}


class TestRefused:
    @pytest.mark.parametrize("name", MUTATIONS)
    def test_the_error_names_the_mismatch(self, name: str, copy: Path) -> None:
        change, text = MUTATIONS[name]
        alter(copy, change)
        with pytest.raises(ArtifactError) as caught:
            read_base(copy)
        assert any(Q_PROJ in line and text in line for line in caught.value.details), caught.value
        assert "bf16" in caught.value.hint

    def test_every_finding_at_once(self, copy: Path) -> None:
        v_proj = Q_PROJ.replace("q_proj", "v_proj")
        alter(copy, lambda tensors: [tensors.pop(Q_PROJ + ".absmax"), tensors.pop(v_proj)])
        with pytest.raises(ArtifactError, match=r"\(and 1 more\)") as caught:
            read_base(copy)
        assert sorted(line.partition(":")[0] for line in caught.value.details) == [Q_PROJ, v_proj]

    @pytest.mark.parametrize(
        ("fields", "how"),
        [
            ({"quant_method": "gptq", "bits": 4}, "gptq"),
            ({"quant_method": "awq", "bits": 4}, "awq"),
            ({"quant_method": "mxfp4"}, "mxfp4"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
            ({"_load_in_8bit": True, "_load_in_4bit": False}, "bitsandbytes, 8 bits"),
            ({"quant_method": "bitsandbytes"}, "bitsandbytes, number of bits unknown"),
            ({"bits": 3}, "an unknown method"),
        ],
    )
    def test_other_ways_of_storing_by_name(
        self, fields: dict[str, Any], how: str, copy: Path
    ) -> None:
        (copy / "config.json").write_text(json.dumps({"quantization_config": fields}))
        with pytest.raises(ArtifactError) as caught:
            read_base(copy)
        assert f"stored quantised ({how})" in caught.value.message
        assert "original in bf16" in caught.value.hint

    def test_a_configuration_that_says_nothing_of_it(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        del config["quantization_config"]
        (copy / "config.json").write_text(json.dumps(config))
        message = "does not say that the weights are packed"
        with pytest.raises(ArtifactError, match=message):
            read_base(copy)

    def test_a_configuration_that_speaks_of_plain_weights(self, qwen: Artifact, copy: Path) -> None:
        shutil.copy(qwen.path / "model.safetensors", copy)
        message = "no tensor is packed.*remove quantization_config"
        with pytest.raises(ArtifactError, match=message):
            read_base(copy)

    def test_before_training_with_the_truth(self) -> None:
        known = preflight.Known(config={"quantization_config": SAID})
        (finding,) = preflight.quantised("qlora", known)
        assert finding.found == "the base is already quantised (bitsandbytes, 4 bits, nf4)"
        assert "to merge into, not to train from" in finding.allowed
        eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        known = preflight.Known(config={"quantization_config": eight})
        (finding,) = preflight.quantised("lora", known)
        assert finding.found == "the base is already quantised (bitsandbytes, 8 bits)"
        assert finding.allowed == "bfloat16"
