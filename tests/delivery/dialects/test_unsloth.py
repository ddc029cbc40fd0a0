"""16-bit merges of unsloth: full models with unsloth's own marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.audit.repair import repair
from tests.delivery.conftest import Done
from tests.delivery.dialects.saving import INDEX, unsloth_merged
from tests.delivery.test_deliver import loads, same
from tests.weights.adapters.making import quiet
from tests.weights.heads.making import change_config
from tests.weights.making import state_of

Run = Callable[..., Done]


@pytest.fixture(params=["1GB", "40KB"], ids=["one file", "shards"])
def sixteen_bits(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Path:
    """The 16-bit base, in one file or in several shards."""
    folder = tmp_path / "hub"
    with quiet():
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(
            folder, max_shard_size=request.param
        )
    return folder


def test_a_merge_is_served_as_it_is(
    here: Run, merged: dict[str, torch.Tensor], base: Path, sixteen_bits: Path, tmp_path: Path
) -> None:
    unsloth_merged(merged, sixteen_bits, tmp_path / "merged_16bit")
    done = here(f"source={tmp_path / 'merged_16bit'}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert"]
    actual = state_of(tmp_path / "out")
    assert actual.keys() == state_of(base).keys()
    assert same(actual, merged)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config
    codes = {finding["code"] for finding in done.summary["findings"]}
    assert "GENERATION_CONFIG_MISSING" in codes
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    loads(tmp_path / "out")


def test_shards_of_which_the_index_was_not_copied(
    here: Run, merged: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    """unsloth #1521, #1122: refused with the command that rebuilds it, and then delivered."""
    source, whole = tmp_path / "merged_16bit", tmp_path / "whole"
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(base)
        model.save_pretrained(tmp_path / "hub", max_shard_size="40KB")
    unsloth_merged(merged, tmp_path / "hub", source)
    (source / INDEX).unlink()
    done = here(f"source={source}", f"out={tmp_path / 'out'}")
    assert done.code == 2, done.output
    assert f"fix: rebuild it: python flows/audit.py source={source} fix=true" in done.output
    assert f"-> python flows/audit.py source={source} fix=true out_dir=" in done.output
    repair(source, whole)
    done = here(f"source={whole}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert same(state_of(tmp_path / "out"), merged)


def test_a_quantiser_that_was_left_in_its_configuration_is_refused(
    here: Run, merged: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    unsloth_merged(merged, base, tmp_path / "merged")
    quantiser = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    change_config(tmp_path / "merged", quantization_config=quantiser)
    done = here(f"source={tmp_path / 'merged'}", f"out={tmp_path / 'out'}")
    assert done.code == 2, done.output
    assert "QUANT_CONFIG_STALE config.json" in done.output
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "runs").exists()
