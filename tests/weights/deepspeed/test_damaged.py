"""A broken or hostile checkpoint is refused by name, and the audit has a code for it."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.audit.run import audit
from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.checkpoint import read_zero
from tests.audit.making import adapter_tensors, codes, errors, make_adapter

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


def copy(pattern: str, name: Callable[[str], str]) -> Damage:
    """Copy the first file of a pattern under another name."""

    def damage(folder: Path) -> None:
        path = files(folder, pattern)[0]
        shutil.copy(path, path.with_name(name(path.name)))

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


def _spoil_universal(folder: Path) -> None:
    (zero,) = folder.glob("*/zero")
    shutil.rmtree(zero / "model.norm.weight")
    torch.save(torch.zeros(5), zero / "model.embed_tokens.weight" / "fp32.pt")
    shutil.copytree(zero / "model.layers.0.input_layernorm.weight", zero / "stranger")


def _integers(folder: Path) -> None:
    (zero,) = folder.glob("*/zero")
    torch.save(torch.ones(12, dtype=torch.int32), zero / "model.norm.weight" / "fp32.pt")


def _optimizer(**changes: Any) -> Callable[[State], object]:
    return lambda state: state["optimizer_state_dict"].update(changes)


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep, deep]  # its repr would have 2**60 parts
    return deep


def _update(**changes: Any) -> Callable[[State], object]:
    return lambda state: state.update(changes)


DAMAGES: dict[str, tuple[str, Damage, list[str], str]] = {
    # name: (checkpoint, damage, what the error names, the audit's code)
    "rank missing": ("full-3", remove(OPTIM_1), ["absent: 1"], "ZERO_RANK_MISSING"),
    "no optimizer": ("lora-2", remove("*_optim_states.pt"), ["2 ranks"], "ZERO_RANK_MISSING"),
    "rank too many": (
        "full-2",
        copy(OPTIM_0, lambda name: name.replace("rank_0_", "rank_2_")),
        ["2 ranks"],
        "ZERO_WORLD_DISAGREES",
    ),
    "rank twice": (
        "full-2", copy(OPTIM_0, lambda name: name.removeprefix("bf16_")), ["rank 0"], "",
    ),
    "tensor parallel": (
        "full-3",
        copy(MODEL_0, lambda _: "zero_pp_rank_0_mp_rank_01_model_states.pt"),
        ["mp_rank_01"],
        "ZERO_PARALLEL",
    ),
    "pipeline parallel": (
        "full-3",
        copy(MODEL_0, lambda _: "layer_03-model_00-model_states.pt"),
        ["layer_03"],
        "ZERO_PARALLEL",
    ),
    "experts": (
        "full-3",
        copy(MODEL_0, lambda _: "layer_0_expert_1_mp_rank_00_model_states.pt"),
        ["layer_0_expert_1"],
        "ZERO_PARALLEL",
    ),
    "two steps": (
        "full-3", rewrite(MODEL_1, _update(global_steps=1)), ["step"], "ZERO_STEPS_MIXED",
    ),
    "optimizer step": ("full-2", rewrite(OPTIM_1, _step_back), ["optimizer step"], ""),
    "short part of ZeRO-3": (
        "full-3", rewrite(OPTIM_1, _shorten("fp32_flat_groups")), ["rank 1: parameters need"], "",
    ),
    "short part of ZeRO-2": (
        "full-2",
        rewrite(OPTIM_0, _shorten("single_partition_of_fp32_groups")),
        ["group 0: parameters need"],
        "",
    ),
    "parts swapped": ("full-2", _swap, [], ""),
    "frozen part missing": (
        "lora-3",
        rewrite(MODEL_1, lambda state: state["frozen_param_fragments"].pop(NORM)),
        [NORM],
        "",
    ),
    "frozen weight missing": (
        "lora-3",
        rewrite("*_model_states.pt", lambda state: state["frozen_param_shapes"].pop(NORM)),
        [NORM],
        "",
    ),
    "empty tensor": (
        "lora-1",
        rewrite(MODEL, lambda state: state["module"].update({NORM: torch.empty(0)})),
        [NORM],
        "",
    ),
    "universal": (
        "full-3-universal",
        _spoil_universal,
        ["zero/stranger", "zero/model.norm.weight/fp32.pt", "[5]"],
        "",
    ),
    "universal integers": ("full-3-universal", _integers, ["I32"], ""),
    "files cut short": ("full-3", cut("*_optim_states.pt"), ["_0_", "_1_"], "ZERO_UNUSABLE"),
    "dangling latest": ("full-2", latest("global_step9"), ["global_step9"], "ZERO_LATEST_DANGLING"),
    "no latest": (
        "full-2",
        _two_steps_and_none_named,
        ["global_step2", "global_step4"],
        "ZERO_LATEST_DANGLING",
    ),
    "latest leads out": ("full-2", latest("../full-2/global_step2"), ["latest"], ""),
    "latest is absolute": ("full-2", latest("/etc"), ["latest"], ""),
    "latest is empty": ("full-2", latest(""), ["latest"], ""),
    "endless paddings": (
        "full-2",
        rewrite(OPTIM_0, _optimizer(param_alignment_paddings=[[0] * 100_000] * 100_000)),
        ["100000 paddings"],
        "",
    ),
    "endless groups": (
        "full-2",
        rewrite(MODEL, lambda s: s.update(param_shapes=[s["param_shapes"][0]] * 100_000)),
        ["group"],
        "",
    ),
    "endless shapes": (
        "full-2",
        rewrite(MODEL, _update(param_shapes=[{str(n): [1] * 100_000 for n in range(9)}])),
        ["param_shapes"],
        "",
    ),
    "deep count": ("full-2", rewrite(OPTIM_0, _optimizer(partition_count=_deep())), ["count"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_refused_by_name(name: str, copied: Copied) -> None:
    case, damage, things, code = DAMAGES[name]
    folder = copied(case)
    damage(folder)
    with pytest.raises(ArtifactError) as raised:
        read_zero(folder)
    report = "\n".join([raised.value.message, *raised.value.details])
    assert [thing for thing in things if thing not in report] == []
    assert len(report) < 10_000
    if code:
        assert code in errors(codes(folder))


def test_states_of_other_types_are_refused_or_ignored(copied: Copied) -> None:
    folder = copied("full-2")
    (path,) = files(folder, MODEL)
    whole = path.read_bytes()
    for key in ("param_shapes", "buffer_names", "shared_params", "module"):
        for value in (3, "x", [3], {"a": 3}):
            path.write_bytes(whole)
            rewrite(MODEL, _update(**{key: value}))(folder)
            if (key, value) == ("buffer_names", [3]):
                read_zero(folder)
                continue
            with pytest.raises(ArtifactError):
                read_zero(folder)


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


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArtifactError, match=folder.name):
            read_zero(folder)


@pytest.mark.parametrize("case", ["full-1", "lora-3", "full-2-universal"])
def test_the_audit_tells_how_to_gather_a_complete_checkpoint(saved: Path, case: str) -> None:
    report = audit(saved / case)
    assert report.kind == "deepspeed"
    assert report.ok, report.text()
    (finding,) = [f for f in report.findings if f.code == "ZERO_NOT_GATHERED"]
    assert f"source={saved / case} " in finding.fix


def test_an_empty_adapter_beside_its_shards_can_be_gathered(copied: Copied) -> None:
    folder = copied("lora-3")
    make_adapter(folder, {key: value[:0, 0] for key, value in adapter_tensors().items()})
    by_code = {finding.code: finding for finding in audit(folder).findings}
    assert "EMPTY_TENSOR" in by_code
    assert f"source={folder}/global_step2 " in by_code["ZERO_BESIDE"].fix
