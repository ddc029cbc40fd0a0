"""LoRA adapters of every tool: what is delivered is peft's own merge, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deliver.conftest import Done
from tests.deliver.dialects import saving
from tests.deliver.test_deliver import merged_by_peft, same
from tests.weights.making import state_of

Run = Callable[..., Done]

DIALECTS = {
    "out": (saving.llamafactory, {"ADAPTER_IS_NO_MODEL", "PICKLE_CLASSES"}),
    "axolotl-out": (saving.axolotl, {"ADAPTER_IS_NO_MODEL", "CONFIG_BESIDE_ADAPTER"}),
    "lora_adapter": (saving.verl, {"ADAPTER_IS_NO_MODEL"}),
}
"""By name of the folder: who saves into it, and what the audit has to say of it."""


@pytest.mark.parametrize("name", DIALECTS)
def test_is_delivered_as_peft_merges_it(
    here: Run, name: str, trained: Any, merged: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    save, said = DIALECTS[name]
    source = tmp_path / "checkpoints" / name
    save(trained, source)
    done = here(f"source={source}", f"base={base}", f"out={tmp_path / 'served'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "merge", "convert"]
    found = state_of(tmp_path / "served")
    assert found.keys() == state_of(base).keys()
    assert same(found, merged)
    assert {one["code"] for one in done.summary["findings"]} >= said
    assert not [one for one in done.summary["findings"] if one["severity"] == "error"]
    assert not list((tmp_path / "served").glob("training_args.bin"))


def test_of_openrlhf_under_zero3_is_a_pickle(
    here: Run, trained: Any, base: Path, tmp_path: Path
) -> None:
    saving.openrlhf_zero3(trained, tmp_path / "ckpt")
    done = here(f"source={tmp_path / 'ckpt'}", f"base={base}", f"out={tmp_path / 'served'}")
    assert done.code == 0, done.output
    assert "a PEFT adapter of rank 4 (adapter_model.bin)" in done.output
    assert same(state_of(tmp_path / "served"), merged_by_peft(base, tmp_path / "ckpt"))
    codes = {one["code"] for one in done.summary["findings"]}
    assert {"PICKLED_WEIGHTS", "CONFIG_BESIDE_ADAPTER"} <= codes
