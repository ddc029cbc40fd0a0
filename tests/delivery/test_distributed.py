"""Checkpoints of torch.distributed.checkpoint (FSDP2) are delivered as the live model was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import run_ranks
from tests.delivery.conftest import Done
from tests.delivery.making import differing, merged_by_peft
from tests.delivery.save_distributed import take_step, with_adapter
from tests.weights.making import load

Here = Callable[..., Done]
WIDE = "convert.dtype=float32"


@pytest.fixture
def full(base: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a trained model and its optimizer, and the model's tensors."""
    from torch.distributed import checkpoint

    model = load(base).float()
    optimizer = take_step(model)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=tmp_path / "full")
    return tmp_path / "full", {name: x.detach() for name, x in model.state_dict().items()}


def test_a_full_model_is_delivered(
    full: tuple[Path, dict[str, Any]], base: Path, here: Here, tmp_path: Path
) -> None:
    """The folder of a training step may hold it further down, beside the optimizer's."""
    source, live = full
    step = tmp_path / "step_10"
    shutil.copytree(source, step / "policy" / "optimizer")
    source.rename(step / "policy" / "weights")
    here(f"source={step}", f"base={base}", WIDE)
    served = load_file(tmp_path / "out" / "model.safetensors")
    assert differing(served, live) == []


def test_an_adapter_is_delivered_as_peft_merges_it(base: Path, here: Here, tmp_path: Path) -> None:
    """The checkpoint also has the frozen base."""
    from torch.distributed import checkpoint

    source = tmp_path / "checkpoint"
    model = with_adapter(load(base), source)
    take_step(model)
    checkpoint.save(model.state_dict(), checkpoint_id=source)
    model.save_pretrained(tmp_path / "adapter")
    here(f"source={source}", f"base={base}", "merge.base=original")
    wanted = merged_by_peft(base, tmp_path / "adapter")
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), wanted) == []


@pytest.mark.parametrize("damage", ["table", "missing", "cut"])
def test_a_damaged_checkpoint_is_refused_by_the_file(
    damage: str, full: tuple[Path, dict[str, Any]], base: Path, here: Here
) -> None:
    source, _ = full
    shard = source / "__0_0.distcp"
    if damage == "table":
        os.truncate(source / ".metadata", 1000)
    elif damage == "missing":
        shard.rename(source / "__9_0.distcp")
    else:
        os.truncate(shard, shard.stat().st_size - 100)
    done = here(f"source={source}", f"base={base}", code=2)
    assert (".metadata" if damage == "table" else "__0_0.distcp") in done.output


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["accelerate"], ["lora"], ["lora", "accelerate"]])
def test_two_ranks_of_fsdp2_are_delivered_as_the_live_model(
    words: list[str], base: Path, deliver: Callable[..., Done], tmp_path: Path
) -> None:
    run_ranks(
        "tests.delivery.save_distributed", str(base), str(tmp_path), *words,
        log_path=tmp_path / "ranks.log",
    )  # fmt: skip
    source = tmp_path / "checkpoint"
    mode = ["merge.base=original"] if "lora" in words else []
    deliver(f"source={source}", f"base={base}", WIDE, *mode)
    served = load_file(tmp_path / "out" / "model.safetensors")
    live = load_file(tmp_path / "live.safetensors")
    if "lora" not in words:
        assert differing(served, live) == []
        return
    for name, x in served.items():
        module, _, kind = f"base_model.model.{name}".rpartition(".")
        wanted = live.get(f"{module}.base_layer.{kind}", live.get(f"{module}.{kind}"))
        if kind == "weight" and f"{module}.lora_A.default.weight" in live:
            a, b = (live[f"{module}.lora_{half}.default.weight"] for half in "AB")
            wanted = wanted + 2.0 * b @ a
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-6)
