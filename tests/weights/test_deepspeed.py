"""Checkpoints of every ZeRO stage equal DeepSpeed's conversion; broken ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.audit.run import audit
from tasks.core.errors import ArtifactError
from tasks.weights.files.dtypes import torch_dtype
from tasks.weights.files.tensors import read_all
from tasks.weights.zero import ZeroCheckpoint, read_zero
from tests.audit.making import codes, errors
from tests.commands import run_ranks


def save_checkpoints(root: Path, world_size: int) -> Path:
    """Save every case of `save_checkpoints.py` below `root`."""
    run_ranks(
        "tests.weights.save_checkpoints",
        str(root),
        log_path=root.with_suffix(".log"),
        ranks=world_size,
        TORCHDYNAMO_DISABLE="1",
    )
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of two ranks, one folder per case."""
    return save_checkpoints(tmp_path_factory.mktemp("zero") / "two", 2)


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a case, to damage it."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


SAME_AS_DEEPSPEED = (
    "full-2", "round-robin", "full-3",
    "lora-1-trained", "lora-2", "lora-2-trained", "lora-3", "lora-3-trained",
)  # fmt: skip


def state(checkpoint: ZeroCheckpoint) -> dict[str, torch.Tensor]:
    """Return all tensors, tied ones under each of their names."""
    tensors = {}
    for name, info in checkpoint.tensors.items():
        flat = torch.from_numpy(read_all(info)).view(torch_dtype(info.dtype))
        tensors[name] = flat.reshape(info.shape)
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
    if case[-1].isdigit():
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


Copied = Callable[[str], Path]
Damage = Callable[[Path], object]
State = dict[str, Any]

NORM = "base_model.model.model.norm.weight"
MODEL_1, OPTIM_1 = "*_1_*_model_states.pt", "*_1_*_optim_states.pt"
MODEL_0, OPTIM_0 = "*_0_*_model_states.pt", "*_0_*_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def files(folder: Path, pattern: str) -> list[Path]:
    paths = sorted(folder.glob(f"*/{pattern}"))
    assert paths, pattern
    return paths


def remove(pattern: str) -> Damage:
    return lambda folder: [path.unlink() for path in files(folder, pattern)]


def cut(pattern: str) -> Damage:
    return lambda folder: [p.write_bytes(p.read_bytes()[:-100]) for p in files(folder, pattern)]


def copy(pattern: str, name: str | tuple[str, str]) -> Damage:
    """Copy the first file of a pattern under another name, or with a part of its name replaced."""

    def damage(folder: Path) -> None:
        path = files(folder, pattern)[0]
        new = name if isinstance(name, str) else path.name.replace(*name)
        shutil.copy(path, path.with_name(new))

    return damage


def rewrite(pattern: str, change: Callable[[State], object]) -> Damage:
    """Load files with torch, change them and save them again."""

    def damage(folder: Path) -> None:
        for path in files(folder, pattern):
            state = torch.load(path, weights_only=False)
            change(state)
            torch.save(state, path)

    return damage


def latest(text: str) -> Damage:
    return lambda folder: (folder / "latest").write_text(text)


def _step_back(state: State) -> None:
    for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        entry["step"] = entry["step"] - 1


def _shorten(key: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        groups = state["optimizer_state_dict"][key]
        groups[0] = groups[0].detach()[:-7].clone()

    return change


def _swap(folder: Path) -> None:
    first, second = files(folder, "*_optim_states.pt")
    spare = first.rename(first.with_suffix(".spare"))
    second.rename(first)
    spare.rename(second)


def _two_steps_and_none_named(folder: Path) -> None:
    shutil.copytree(folder / "global_step2", folder / "global_step4")
    (folder / "latest").unlink()


def _without(key: str) -> Callable[[State], object]:
    return lambda state: state[key].pop(NORM)


def _update(**changes: Any) -> Callable[[State], object]:
    return lambda state: state.update(changes)


def _endless_groups(state: State) -> None:
    state["param_shapes"] = [state["param_shapes"][0]] * 100_000


FLAT_2, FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
TENSOR_PARALLEL = "zero_pp_rank_0_mp_rank_01_model_states.pt"

DAMAGES: dict[str, tuple[str, Damage, list[str]]] = {
    # name: (checkpoint, damage, what the error names)
    "rank missing": ("full-3", remove(OPTIM_1), ["absent: 1"]),
    "no optimizer": ("lora-2", remove("*_optim_states.pt"), ["2 ranks"]),
    "rank too many": ("full-2", copy(OPTIM_0, ("rank_0_", "rank_2_")), ["2 ranks"]),
    "tensor parallel": ("full-3", copy(MODEL_0, TENSOR_PARALLEL), ["mp_rank_01"]),
    "pipeline parallel": ("full-3", copy(MODEL_0, "layer_03-model_states.pt"), ["layer_03"]),
    "two steps": ("full-3", rewrite(MODEL_1, _update(global_steps=1)), ["step"]),
    "optimizer step": ("full-2", rewrite(OPTIM_1, _step_back), ["optimizer step"]),
    "short part of ZeRO-3": ("full-3", rewrite(OPTIM_1, _shorten(FLAT_3)), ["rank 1: "]),
    "short part of ZeRO-2": ("full-2", rewrite(OPTIM_0, _shorten(FLAT_2)), ["group 0: "]),
    "parts swapped": ("full-2", _swap, []),
    "frozen part missing": ("lora-3", rewrite(MODEL_1, _without("frozen_param_fragments")), [NORM]),
    "universal": ("full-3", lambda folder: (folder / "global_step2/zero").mkdir(), ["universal"]),
    "files cut short": ("full-3", cut("*_optim_states.pt"), ["_0_", "_1_"]),
    "dangling latest": ("full-2", latest("global_step9"), ["global_step9"]),
    "no latest": ("full-2", _two_steps_and_none_named, ["global_step2", "global_step4"]),
    "endless groups": ("full-2", rewrite(MODEL, _endless_groups), ["group"]),
}  # fmt: skip


def test_every_damage_is_refused_by_name(copied: Copied) -> None:
    missed = []
    for name, (case, damage, things) in DAMAGES.items():
        folder = copied(case)
        damage(folder)
        try:
            read_zero(folder)
            report = "nothing"
        except ArtifactError as error:
            report = "\n".join([error.message, *error.details])
        if report == "nothing" or any(thing not in report for thing in things):
            missed.append((name, report))
        if name == "two steps" and "ZERO_UNUSABLE" not in errors(codes(folder)):
            missed.append((name, "no ZERO_UNUSABLE"))
        shutil.rmtree(folder)
    assert missed == []


def test_the_audit_tells_how_to_gather_a_complete_checkpoint(saved: Path) -> None:
    report = audit(saved / "lora-3")
    assert report.kind == "deepspeed"
    assert report.ok, report.text()
    (finding,) = [f for f in report.findings if f.code == "ZERO_NOT_GATHERED"]
    assert f"source={saved / 'lora-3'} " in finding.fix
