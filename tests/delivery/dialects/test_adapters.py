"""LoRA adapters of every tool: the delivered model is bit-identical to peft's own merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.delivery.conftest import Done
from tests.delivery.dialects import saving
from tests.delivery.test_deliver import merged_by_peft, same, servable
from tests.weights.making import Spread, state_of, trained_model

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
    save, codes = DIALECTS[name]
    source = tmp_path / "checkpoints" / name
    save(trained, source)
    done = here(
        f"source={source}", f"base={base}", "merge.base=original", f"out={tmp_path / 'served'}"
    )
    assert done.code == 0, done.output
    assert done.stages == ["audit", "merge", "convert"]
    actual = state_of(tmp_path / "served")
    assert actual.keys() == state_of(base).keys()
    assert same(actual, merged)
    assert {finding["code"] for finding in done.summary["findings"]} >= codes
    assert not [finding for finding in done.summary["findings"] if finding["severity"] == "error"]
    assert not list((tmp_path / "served").glob("training_args.bin"))


def test_openrlhf_adapter_under_zero3_is_a_pickle(
    here: Run, trained: Any, base: Path, tmp_path: Path
) -> None:
    saving.openrlhf_zero3(trained, tmp_path / "ckpt")
    done = here(
        f"source={tmp_path / 'ckpt'}",
        f"base={base}",
        "merge.base=original",
        f"out={tmp_path / 'served'}",
    )
    assert done.code == 0, done.output
    assert "a PEFT adapter of rank 4 (adapter_model.bin)" in done.output
    assert same(state_of(tmp_path / "served"), merged_by_peft(base, tmp_path / "ckpt"))
    codes = {finding["code"] for finding in done.summary["findings"]}
    assert {"PICKLED_WEIGHTS", "CONFIG_BESIDE_ADAPTER"} <= codes


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llamafactory_adapter_in_vllm_agrees_with_peft(deliver: Run, tmp_path: Path) -> None:
    """Deliver with vLLM: the folder of the last step is not used, and vLLM agrees with peft."""
    base = servable(tmp_path / "base")
    saving.llamafactory(trained_model(base, Spread(), 1), tmp_path / "out" / "lora")
    source, served = tmp_path / "out" / "lora", tmp_path / "served"
    done = deliver(
        f"source={source}",
        f"base={base}",
        "merge.base=original",
        f"out={served}",
        engine="vllm",
        timeout=570,
    )
    assert done.code == 0, done.output
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert done.summary["stages"][-1]["drift"]["mean_kl"] < 1e-3
    (smoke,) = (stage for stage in done.summary["stages"] if stage["name"] == "smoke_eval")
    report = json.loads((Path(smoke["artifact"]) / "report.json").read_text())
    assert report["engine"] == "vllm"
    assert all(check["ok"] for check in report["checks"])
    assert same(state_of(served), merged_by_peft(base, source))
