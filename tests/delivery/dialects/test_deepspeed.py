"""ZeRO-3 checkpoints that were not gathered: an adapter of empty tensors beside the shards.

The shards are in DeepSpeed's layout, written without it; `tests/delivery/test_zero.py` uses
DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delivery.conftest import Done
from tests.delivery.test_deliver import same
from tests.weights.deepspeed.test_partitions_property import write
from tests.weights.making import state_of

Run = Callable[..., Done]


@pytest.fixture(params=[2, 3])
def trainer_folder(
    request: pytest.FixtureRequest, trained: Any, adapter: Path, tmp_path: Path
) -> Path:
    """A folder of transformers' Trainer: the adapter, and the engine's state of ZeRO-2 or 3."""
    source: Path = tmp_path / "checkpoint-1"
    live = {n: p.detach().float() for n, p in trained.named_parameters() if p.requires_grad}
    write(source, [live], request.param, 2, 2)
    held = load_file(adapter / "adapter_model.safetensors")
    save_file({name: torch.empty(0) for name in held}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return source


def test_the_refusal_names_the_command_that_gathers_them(
    here: Run, trainer_folder: Path, merged: dict[str, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = here(f"source={trainer_folder}", f"base={base}", f"out={out}")
    assert done.code == 2, done.output
    assert "EMPTY_TENSOR adapter_model.safetensors" in done.output
    told = re.search(r"-> python flows/deliver.py (source=\S+)", done.output)
    assert told is not None, done.output
    done = here(told[1], f"base={base}", "merge.base=original", f"out={out}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "gather", "merge", "convert"]
    assert same(state_of(out), merged)
