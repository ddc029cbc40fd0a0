"""A broken checkpoint is refused with one error that names every finding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.checkpoint import read_zero

Copied = Callable[[str], Path]


def files(folder: Path, pattern: str) -> list[Path]:
    paths = sorted(folder.glob(f"*/{pattern}"))
    assert paths, pattern
    return paths


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load a file, change it and save it again, with torch."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def findings(folder: Path) -> list[str]:
    with pytest.raises(ArtifactError) as raised:
        read_zero(folder)
    return [raised.value.message, *raised.value.details]


def test_missing_ranks_are_named(copied: Copied) -> None:
    folder = copied("full-3")
    files(folder, "*_1_*_optim_states.pt")[0].unlink()
    files(folder, "*_0_*_model_states.pt")[0].unlink()
    lines = findings(folder)
    assert "optim states of 2 ranks, absent: 1" in lines
    assert "model states of 2 ranks, absent: 0" in lines


def test_all_optimizer_states_missing(copied: Copied) -> None:
    folder = copied("lora-2")
    for path in files(folder, "*_optim_states.pt"):
        path.unlink()
    assert any("fp32 weights of all 2 ranks are absent" in line for line in findings(folder))


def test_a_rank_too_many(copied: Copied) -> None:
    folder = copied("full-2")
    first = files(folder, "*_0_*_optim_states.pt")[0]
    shutil.copy(first, first.with_name(first.name.replace("rank_0_", "rank_2_")))
    assert any("there are only 2 ranks" in line for line in findings(folder))


def test_two_files_of_one_rank(copied: Copied) -> None:
    folder = copied("full-2")
    first = files(folder, "*_0_*_optim_states.pt")[0]
    shutil.copy(first, first.with_name(first.name.removeprefix("bf16_")))
    assert any("rank 0 has another file" in line for line in findings(folder))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor or pipeline parallel"),
        ("layer_03-model_00-model_states.pt", "pipeline parallel"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
    ],
)
def test_other_parallelism_is_refused_by_name(copied: Copied, name: str, what: str) -> None:
    folder = copied("full-3")
    model = files(folder, "*_0_*_model_states.pt")[0]
    shutil.copy(model, model.with_name(name))
    assert any(name in line and what in line for line in findings(folder))


def test_files_of_two_steps(copied: Copied) -> None:
    folder = copied("full-3")
    rewrite(files(folder, "*_1_*_model_states.pt")[0], lambda state: state.update(global_steps=1))
    assert any("more than one step" in line for line in findings(folder))


def test_an_optimizer_part_of_another_step(copied: Copied) -> None:
    def back(state: dict[str, Any]) -> None:
        for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["step"] = entry["step"] - 1

    folder = copied("full-2")
    rewrite(files(folder, "*_1_*_optim_states.pt")[0], back)
    assert any("more than one optimizer step" in line for line in findings(folder))


def test_sizes_that_do_not_add_up_are_named(copied: Copied) -> None:
    def cut(key: str) -> Callable[[dict[str, Any]], None]:
        def change(state: dict[str, Any]) -> None:
            groups = state["optimizer_state_dict"][key]
            groups[0] = groups[0].detach()[:-7].clone()

        return change

    folder = copied("full-3")
    rewrite(files(folder, "*_1_*_optim_states.pt")[0], cut("fp32_flat_groups"))
    assert any("rank 1: parameters need" in line for line in findings(folder))
    folder = copied("full-2")
    rewrite(files(folder, "*_0_*_optim_states.pt")[0], cut("single_partition_of_fp32_groups"))
    assert any("group 0: parameters need" in line for line in findings(folder))


def test_parts_swapped_between_ranks_are_noticed(copied: Copied) -> None:
    folder = copied("full-2")
    first, second = files(folder, "*_optim_states.pt")
    spare = first.with_suffix(".spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    assert findings(folder)


def test_a_frozen_part_that_is_missing(copied: Copied) -> None:
    folder = copied("lora-3")
    name = "base_model.model.model.norm.weight"
    rewrite(
        files(folder, "*_1_*_model_states.pt")[0],
        lambda state: state["frozen_param_fragments"].pop(name),
    )
    assert any(name in line and "the ranks hold [6]" in line for line in findings(folder))


def test_a_parameter_of_which_nothing_was_saved(copied: Copied) -> None:
    folder = copied("lora-3")
    name = "base_model.model.model.norm.weight"
    for path in files(folder, "*_model_states.pt"):
        rewrite(path, lambda state: state["frozen_param_shapes"].pop(name))
    assert f"{name}: a parameter of the model, but no rank holds data of it" in findings(folder)


def test_an_empty_tensor_is_refused(copied: Copied) -> None:
    folder = copied("lora-1")
    name = "base_model.model.model.norm.weight"
    rewrite(
        files(folder, "mp_rank_00_model_states.pt")[0],
        lambda state: state["module"].update({name: torch.empty(0)}),
    )
    assert f"{name}: has no elements, shape [0]" in findings(folder)


def test_a_universal_parameter_that_is_missing_cut_or_extra(copied: Copied) -> None:
    folder = copied("full-3-universal")
    (zero,) = folder.glob("*/zero")
    shutil.rmtree(zero / "model.norm.weight")
    torch.save(torch.zeros(5), zero / "model.embed_tokens.weight" / "fp32.pt")
    shutil.copytree(zero / "model.layers.0.input_layernorm.weight", zero / "stranger")
    lines = findings(folder)
    assert any("zero/stranger" in line for line in lines)
    assert any("no zero/model.norm.weight/fp32.pt" in line for line in lines)
    assert any("[5], the model's is [37, 12]" in line for line in lines)


def test_every_truncated_file_is_named(copied: Copied) -> None:
    folder = copied("full-3")
    paths = files(folder, "*_optim_states.pt")
    for path in paths:
        path.write_bytes(path.read_bytes()[:-100])
    lines = findings(folder)
    assert all(any(path.name in line for line in lines[1:]) for path in paths)


def test_latest_names_an_absent_step(copied: Copied) -> None:
    folder = copied("full-2")
    (folder / "latest").write_text("global_step9")
    assert any("names global_step9" in line for line in findings(folder))


def test_several_steps_and_none_named(copied: Copied) -> None:
    folder = copied("full-2")
    shutil.copytree(folder / "global_step2", folder / "global_step4")
    assert read_zero(folder).root.name == "global_step2"
    (folder / "latest").unlink()
    lines = findings(folder)
    assert "2 steps and no file `latest`" in lines[0]
    assert lines[1:] == ["global_step2", "global_step4"]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert "no DeepSpeed checkpoint" in findings(tmp_path)[0]
    assert "no such folder" in findings(tmp_path / "absent")[0]
