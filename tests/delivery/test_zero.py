"""Real DeepSpeed checkpoints of two ranks, compared with DeepSpeed's own converter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.commands import run_ranks
from tests.delivery.conftest import Done
from tests.weights.making import save_tokenizer, state_of

Run = Callable[..., Done]
pytestmark = pytest.mark.slow  # a launch of two ranks


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with all cases, and `base`."""
    root = tmp_path_factory.mktemp("zero") / "saved"
    log_path = root.with_suffix(".log")
    run_ranks("tests.delivery.save_zero", str(root), log_path=log_path, TORCHDYNAMO_DISABLE="1")
    save_tokenizer(root / "base")
    return root


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors as DeepSpeed's converter reads them, in fp32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return {n: t.clone() for n, t in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()}


def test_a_full_fine_tuning(deliver: Run, zero: Path, tmp_path: Path) -> None:
    done = deliver(f"source={zero / 'full'}", f"base={zero / 'base'}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert "a DeepSpeed checkpoint" in done.output
    assert done.stages == ["audit", "gather", "convert"]
    actual, wanted = state_of(tmp_path / "out"), whole(zero / "full")
    assert set(actual) == set(state_of(zero / "base"))
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in actual.items())


def test_an_adapter(deliver: Run, zero: Path, tmp_path: Path) -> None:
    done = deliver(
        f"source={zero / 'lora'}",
        f"base={zero / 'base'}",
        "merge.base=original",
        f"out={tmp_path / 'out'}",
    )
    assert done.code == 0, done.output
    assert done.stages == ["audit", "gather", "merge", "convert"]
    actual, base, wanted = state_of(tmp_path / "out"), state_of(zero / "base"), whole(zero / "lora")
    for name, tensor in actual.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name].float()
        if f"{module}.lora_A.default.weight" in wanted:
            a, b = (wanted[f"{module}.lora_{half}.default.weight"] for half in "AB")
            expected = expected + (b @ a) * 2.0
        assert torch.equal(tensor, expected.bfloat16()), name


def test_an_adapter_without_its_settings_is_refused(
    deliver: Run, zero: Path, tmp_path: Path
) -> None:
    step = zero / "lora" / "global_step1"
    settings = zero / "lora" / "adapter_config.json"
    hidden = settings.rename(tmp_path / "adapter_config.json")
    try:
        done = deliver(f"source={step}", f"base={zero / 'base'}", f"out={tmp_path / 'out'}")
        assert done.code == 2, done.output
        assert "there is no adapter_config.json with its alpha" in done.output
        done = deliver(
            f"source={step}", f"base={zero / 'base'}", f"out={tmp_path / 'out'}",
            f"adapter_config={hidden}", "plan=true",
        )  # fmt: skip
        assert done.code == 2, done.output
        assert "nothing in or above it says whether it was trained" in done.output
        done = deliver(
            f"source={step}", f"base={zero / 'base'}", f"out={tmp_path / 'out'}",
            f"adapter_config={hidden}", "plan=true", "merge.base=original",
        )  # fmt: skip
        assert done.code == 0, done.output
        assert re.search(r"gather: copy 28 tensors", done.output)
    finally:
        hidden.rename(settings)


def test_a_missing_rank_is_named(deliver: Run, zero: Path, tmp_path: Path) -> None:
    (states,) = (zero / "full").rglob("*zero_pp_rank_1*optim_states.pt")
    hidden = states.rename(tmp_path / states.name)
    try:
        done = deliver(f"source={zero / 'full'}", f"base={zero / 'base'}", "out=x", "plan=true")
        assert done.code == 2, done.output
        assert "optim states of 2 ranks, absent: 1" in done.output
    finally:
        hidden.rename(states)
