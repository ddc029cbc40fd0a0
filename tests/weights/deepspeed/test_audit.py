"""Audits of DeepSpeed's own checkpoints: complete and damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.audit.run import audit
from tests.audit.making import adapter_tensors, codes, errors, make_adapter
from tests.weights.deepspeed.test_damaged import Copied, files, rewrite


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("full-1", "of ZeRO-1 or 2"), ("full-2", "of ZeRO-1 or 2"), ("full-3", "of ZeRO-3"),
        ("lora-2", "of ZeRO-1 or 2"), ("lora-3", "of ZeRO-3"), ("full-2-universal", "universal"),
    ],
)  # fmt: skip
def test_a_whole_checkpoint(saved: Path, case: str, what: str) -> None:
    report = audit(saved / case)
    assert report.kind == "deepspeed"
    assert what in report.what
    assert report.ok, report.text()
    (finding,) = [f for f in report.findings if f.code == "ZERO_NOT_GATHERED"]
    assert "of 2 ranks" in finding.found
    assert f"source={saved / case} " in finding.fix


def test_a_rank_that_is_missing(copied: Copied) -> None:
    folder = copied("full-3")
    files(folder, "*_1_*_optim_states.pt")[0].unlink()
    assert errors(codes(folder)) == {"ZERO_RANK_MISSING"}


def test_all_optimizer_states_missing(copied: Copied) -> None:
    folder = copied("lora-2")
    for path in files(folder, "*_optim_states.pt"):
        path.unlink()
    assert errors(codes(folder)) == {"ZERO_RANK_MISSING"}


def test_files_of_two_steps(copied: Copied) -> None:
    folder = copied("full-3")
    rewrite(files(folder, "*_1_*_model_states.pt")[0], lambda state: state.update(global_steps=1))
    assert errors(codes(folder)) == {"ZERO_STEPS_MIXED"}


def test_a_rank_too_many(copied: Copied) -> None:
    folder = copied("full-2")
    first = files(folder, "*_0_*_optim_states.pt")[0]
    shutil.copy(first, first.with_name(first.name.replace("rank_0_", "rank_2_")))
    assert errors(codes(folder)) == {"ZERO_WORLD_DISAGREES"}


def test_latest_names_nothing(copied: Copied) -> None:
    folder = copied("full-2")
    (folder / "latest").write_text("global_step9")
    assert errors(codes(folder)) == {"ZERO_LATEST_DANGLING"}
    (folder / "latest").unlink()
    assert errors(codes(folder)) == set()
    shutil.copytree(folder / "global_step2", folder / "global_step4")
    assert errors(codes(folder)) == {"ZERO_LATEST_DANGLING"}


def test_another_parallelism(copied: Copied) -> None:
    folder = copied("full-3")
    model = files(folder, "*_0_*_model_states.pt")[0]
    shutil.copy(model, model.with_name("layer_03-model_00-model_states.pt"))
    assert errors(codes(folder)) == {"ZERO_PARALLEL"}


def test_a_file_that_is_cut_short(copied: Copied) -> None:
    folder = copied("full-3")
    path = files(folder, "*_optim_states.pt")[0]
    path.write_bytes(path.read_bytes()[:-100])
    assert "ZERO_UNUSABLE" in errors(codes(folder))


def test_an_empty_adapter_beside_its_shards_can_be_gathered(copied: Copied) -> None:
    folder = copied("lora-3")
    make_adapter(folder, {key: value[:0, 0] for key, value in adapter_tensors().items()})
    report = audit(folder)
    by_code = {finding.code: finding for finding in report.findings}
    assert report.kind == "adapter"
    assert "EMPTY_TENSOR" in by_code
    assert by_code["ZERO_BESIDE"].found.endswith("these may be intact")
    assert f"flows/deliver.py source={folder}/global_step2 " in by_code["ZERO_BESIDE"].fix
