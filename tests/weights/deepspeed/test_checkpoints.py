"""Real checkpoints of every ZeRO stage, compared with DeepSpeed's own conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.checkpoint import ZeroCheckpoint, read_zero
from tasks.weights.files.reader import torch_dtype
from tests.weights.deepspeed.conftest import read, save_checkpoints

SAME_AS_DEEPSPEED = (
    "full-2", "round-robin", "full-3", "full-3-universal", "untied-3",
    "lora-1-trained", "lora-2", "lora-2-trained", "lora-3", "lora-3-trained", "lora-3-universal",
)  # fmt: skip


def tensor(checkpoint: ZeroCheckpoint, name: str) -> torch.Tensor:
    info = checkpoint.tensors[name]
    flat = torch.frombuffer(bytearray(read(checkpoint, name)), dtype=torch_dtype(info.dtype))
    return flat.reshape(info.shape)


def state(checkpoint: ZeroCheckpoint) -> dict[str, torch.Tensor]:
    """Return all tensors, tied ones under each of their names."""
    tensors = {name: tensor(checkpoint, name) for name in checkpoint.tensors}
    return tensors | {alias: tensors[name] for alias, name in checkpoint.tied.items()}


def module(folder: Path) -> dict[str, torch.Tensor]:
    """Return the 16-bit state dict of the model states."""
    (path,) = folder.glob("*/mp_rank_00_model_states.pt")
    tensors: dict[str, torch.Tensor] = torch.load(path, weights_only=False)["module"]
    return tensors


def assert_same_as_deepspeed(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    tensors = state(read_zero(folder))
    assert set(tensors) == set(expected)
    for name, want in expected.items():
        # DeepSpeed converts buffers to fp32; here they keep their dtype, which fp32 represents.
        have = tensors[name].float() if name.endswith(".mean") else tensors[name]
        assert have.dtype == want.dtype, name
        assert have.shape == want.shape, name
        assert torch.equal(have.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("case", SAME_AS_DEEPSPEED)
def test_every_tensor_equals_deepspeeds_bit_for_bit(saved: Path, case: str) -> None:
    assert_same_as_deepspeed(saved / case)
    checkpoint = read_zero(saved / case)
    if "universal" not in case and case[-1].isdigit():
        assert (checkpoint.stage, checkpoint.step, checkpoint.world_size) == (int(case[-1]), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks(tmp_path: Path, world_size: int) -> None:
    root = save_checkpoints(tmp_path / "ranks", world_size)
    for case in SAME_AS_DEEPSPEED:
        assert_same_as_deepspeed(root / case)


@pytest.mark.parametrize("case", ["full-0", "bf16-optimizer"])
def test_checkpoints_that_deepspeed_cannot_convert_are_read(saved: Path, case: str) -> None:
    assert (saved / case / "refused.txt").is_file()
    tensors, live = state(read_zero(saved / case)), module(saved / case)
    assert set(tensors) == set(live)
    assert all(torch.equal(tensors[name].to(live[name].dtype), live[name]) for name in live)
    trained = read_zero(saved / case).trained
    if case == "bf16-optimizer":  # the fp32 weights, not the module's
        assert trained
        assert {tensors[name].dtype for name in trained} == {torch.float32}


def test_frozen_weights_of_zero1_are_kept(saved: Path) -> None:
    tensors, live = state(read_zero(saved / "lora-1")), module(saved / "lora-1")
    expected = load_file(saved / "lora-1" / "expected.safetensors")
    frozen = set(tensors) - set(expected)
    assert len(frozen) == 27
    assert set(tensors) == set(live)
    assert all(torch.equal(tensors[name], live[name]) for name in frozen)
    assert all(torch.equal(tensors[name].float(), expected[name].float()) for name in expected)


def test_a_universal_checkpoint_that_deepspeed_mixed_up_is_refused(saved: Path) -> None:
    # DeepSpeed 0.19.8 records wrong offsets of parameters under round_robin_gradients and uses
    # them for the conversion without an error. The plain checkpoint of the same run is right.
    with pytest.raises(ArtifactError) as raised:
        read_zero(saved / "round-robin-universal")
    assert len(raised.value.details) > 10
