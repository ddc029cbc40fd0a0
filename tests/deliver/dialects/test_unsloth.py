"""unsloth's 16-bit merges: full models with marks of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from tests.deliver.conftest import Done
from tests.deliver.dialects.saving import unsloth_merged
from tests.deliver.test_deliver import loads, same
from tests.weights.heads.making import change_config
from tests.weights.making import state_of

Run = Callable[..., Done]


def test_a_merge_is_served_as_it_is(
    here: Run, merged: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    unsloth_merged(merged, base, tmp_path / "merged_16bit")
    done = here(f"source={tmp_path / 'merged_16bit'}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert"]
    found = state_of(tmp_path / "out")
    assert found.keys() == state_of(base).keys()
    assert same(found, merged)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config
    loads(tmp_path / "out")


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
