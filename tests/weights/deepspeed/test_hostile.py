"""Checkpoints made to exhaust memory, to lead outside of their folder, or with unexpected types."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch

from tasks.weights.deepspeed.checkpoint import read_zero
from tests.weights.deepspeed.test_damaged import Copied, files, findings, rewrite


@pytest.mark.parametrize("tag", ["../full-2/global_step2", "/etc", "", ".."])
def test_latest_cannot_lead_out_of_the_folder(copied: Copied, tag: str) -> None:
    folder = copied("full-2")
    (folder / "latest").write_text(tag)
    assert any("not a plain folder name" in line for line in findings(folder))


@pytest.mark.parametrize("key", ["param_shapes", "buffer_names", "shared_params", "module"])
@pytest.mark.parametrize("value", [3, "x", [3], {"a": 3}])
def test_states_of_other_types_are_refused_or_ignored(copied: Copied, key: str, value: Any) -> None:
    folder = copied("full-2")
    rewrite(
        files(folder, "mp_rank_00_model_states.pt")[0], lambda state: state.update({key: value})
    )
    if (key, value) == ("buffer_names", [3]):
        read_zero(folder)
    else:
        assert findings(folder)


def test_more_parameters_than_a_process_may_open_files(copied: Copied) -> None:
    """A universal checkpoint has one file per parameter: thousands for a large model."""
    folder = copied("full-2-universal")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    try:
        assert len(read_zero(folder).trained) > 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_states_that_would_take_any_memory_are_refused(copied: Copied) -> None:
    """References to one long list take few bytes in the file; copies would fill the memory."""
    folder = copied("full-2")
    optim = files(folder, "*_0_*_optim_states.pt")[0]
    rewrite(
        optim,
        lambda state: state["optimizer_state_dict"].update(
            param_alignment_paddings=[[0] * 100_000] * 100_000
        ),
    )
    assert any("100000 paddings for" in line for line in findings(folder))
    model = files(folder, "mp_rank_00_model_states.pt")[0]
    rewrite(model, lambda state: state.update(param_shapes=[state["param_shapes"][0]] * 100_000))
    assert any("holds one group twice" in line for line in findings(folder))
    shape = [1] * 100_000
    rewrite(model, lambda state: state.update(param_shapes=[{str(n): shape for n in range(9)}]))
    assert any("param_shapes: 0 has no shape" in line for line in findings(folder))


def test_the_error_for_a_deep_partition_count_is_short(copied: Copied) -> None:
    folder = copied("full-2")
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep, deep]  # its repr would have 2**60 parts
    rewrite(
        files(folder, "*_0_*_optim_states.pt")[0],
        lambda state: state["optimizer_state_dict"].update(partition_count=deep),
    )
    line = next(line for line in findings(folder) if "partition counts" in line)
    assert len(line) < 400


def test_fp32_weights_that_are_no_floats_are_refused(copied: Copied) -> None:
    folder = copied("full-3-universal")
    (zero,) = folder.glob("*/zero")
    torch.save(torch.ones(12, dtype=torch.int32), zero / "model.norm.weight" / "fp32.pt")
    assert any("I32 is not a float dtype" in line for line in findings(folder))
