"""Executing a plan gives torch's results, for any number of workers, shards and block sizes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError
from tasks.weights.execute import compute, copying
from tasks.weights.execute.execute import Executed, execute
from tasks.weights.files import file_ranges as extents
from tasks.weights.files.header import read_header
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.adapter_ops import Add
from tasks.weights.plan.layout import with_output
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.plan.validate import validate
from tests.weights.making import state_of
from tests.weights.plans import copied, expected, make_inputs, make_plan, tensors

LOG = logging.getLogger("tests.weights")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceRef]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _run(plan: Plan, inputs: dict[str, SourceRef], out: Path, **settings) -> Executed:
    sources = open_sources(inputs)
    validate(plan, sources, out=out)
    return execute(plan, sources, out, **settings)


def _files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_every_kind_of_operation_bit_for_bit(inputs, out) -> None:
    done = _run(make_plan(), inputs, out)
    written, wanted = state_of(out), expected()
    assert written.keys() == wanted.keys()
    assert [name for name in written if not torch.equal(written[name], wanted[name])] == []
    assert len(list(out.glob("*.safetensors"))) > 2
    for file in out.glob("*.safetensors"):
        raw = file.read_bytes()
        for name, info in read_header(file).tensors.items():
            assert done.checksums[name] == blake3(raw[info.start : info.end]).hexdigest()
            assert done.outcomes[name].file == file.name


def test_the_index_agrees_with_the_files(inputs, out) -> None:
    _run(make_plan(), inputs, out)
    checkpoint = read_checkpoint(out)  # refuses an index that disagrees with the files
    assert set(checkpoint.tensors) == set(expected())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected().values())


@pytest.mark.parametrize("shard", [None, 40_000, 1])
def test_the_number_of_workers_changes_no_byte(inputs, tmp_path, shard) -> None:
    folders = []
    for workers in (1, 2, 5):
        out = tmp_path / str(workers)
        out.mkdir()
        _run(make_plan(max_shard_bytes=shard), inputs, out, workers=workers)
        folders.append(_files(out))
    assert folders[0] == folders[1] == folders[2]


@pytest.mark.parametrize("elements", [1, 300, 4096, 1 << 20])
def test_the_size_of_blocks_changes_no_byte(inputs, out, monkeypatch, elements: int) -> None:
    monkeypatch.setattr(compute, "ELEMENTS", elements)
    monkeypatch.setattr(copying, "BLOCK", 16 * elements)
    _run(make_plan(), inputs, out)
    wanted = expected()
    assert [n for n, t in state_of(out).items() if not torch.equal(t, wanted[n])] == []


@pytest.mark.parametrize("rows", [*range(1, 40), 1031])
@pytest.mark.parametrize("columns", [1, 24, 1 << 20])
def test_blocks_cover_all_rows_once_and_none_is_too_small(rows: int, columns: int) -> None:
    edges = list(compute.row_blocks(rows, columns))
    assert edges[0][0] == 0
    assert edges[-1][1] == rows
    assert all(left[1] == right[0] for left, right in pairwise(edges))
    assert all(end - first >= min(rows, compute.ROWS) for first, end in edges)


@pytest.mark.parametrize("rank", [1, 3, 64, 300])
def test_a_product_has_the_same_bits_in_blocks(rank: int) -> None:
    """Check the assumption of `compute.py` for this machine's BLAS, with one and more threads."""
    random = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(*s, generator=random) for s in ((rank, 700), (1100, rank)))
    threads = torch.get_num_threads()
    whole = b @ a
    try:
        torch.set_num_threads(1)
        parts = [b[first:end] @ a for first, end in compute.row_blocks(1100, 30_000)]
    finally:
        torch.set_num_threads(threads)
    assert len(parts) > 60
    assert torch.equal(torch.cat(parts), whole)


def test_unchanged_tensors_are_linked_or_copied_by_the_kernel(inputs, out, monkeypatch) -> None:
    base, _ = tensors()
    checkpoint = read_checkpoint(inputs["base"].path)
    ops = tuple(copied(name, base[name]) for name in checkpoint.tensors)
    plan = with_output(Plan(ops), dtype=None, max_shard_bytes=10**9, files=checkpoint.files)
    first = ops[0]
    moved = replace(first, name=f"{first.name}.moved")  # its file cannot be linked any more
    plan = replace(plan, ops=(moved, *plan.ops[1:]))

    def never(*_: object) -> int:
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(os, "preadv", never)
    only = {"base": inputs["base"]}
    done = _run(plan, only, out)
    second = "model-00002-of-00002.safetensors"
    assert done.linked == [second]
    assert (out / second).read_bytes() == (inputs["base"].path / second).read_bytes()
    assert (done.read, done.written) == (0, 0)
    assert torch.equal(state_of(out)[moved.name], base[first.name])


def test_without_a_manifest_everything_is_read_and_nothing_linked(inputs, out, tmp_path) -> None:
    import shutil

    plain = shutil.copytree(inputs["base"].path, tmp_path / "plain")
    (plain / "manifest.json").unlink()
    base, _ = tensors()
    plan = Plan(tuple(copied(name, tensor) for name, tensor in base.items()))
    done = _run(plan, {"base": SourceRef(plain)}, out)
    assert done.linked == []
    assert done.read == sum(t.nbytes for t in base.values())
    assert done.checksums == _run(plan, {"base": inputs["base"]}, out).checksums


def test_another_tools_manifest_gives_no_hashes(inputs, tmp_path) -> None:
    """Other tools' manifests are not compared with the files, so their hashes are not trusted."""
    import shutil

    folder = shutil.copytree(inputs["base"].path, tmp_path / "folder")
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({"files": document["files"]}))
    os.utime(path)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.checksum("wide") is None


def test_a_file_touched_after_its_manifest_is_read(inputs, tmp_path) -> None:
    import shutil

    folder = shutil.copytree(inputs["base"].path, tmp_path / "folder")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.checksum("wide") is not None
    os.utime(folder / "model-00001-of-00002.safetensors")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.checksum("wide") is None
    assert checkpoint.checksum("norm") is not None


def test_where_the_kernel_cannot_copy_python_does(inputs, out, monkeypatch) -> None:
    import errno

    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(extents.os, "copy_file_range", refuse)
    _run(make_plan(), inputs, out)
    wanted = expected()
    assert [n for n, t in state_of(out).items() if not torch.equal(t, wanted[n])] == []


def test_a_wrong_hash_in_a_manifest_is_noticed_when_the_data_is_read(inputs, out, tmp_path) -> None:
    import shutil

    folder = shutil.copytree(inputs["base"].path, tmp_path / "folder")
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    document["tensors"]["model-00002-of-00002.safetensors"]["ids"]["blake3"] = "0" * 64
    path.write_text(json.dumps(document))
    only = {"base": SourceRef(folder)}
    base, _ = tensors()
    plan = Plan(tuple(copied(name, tensor) for name, tensor in base.items()))
    with pytest.raises(ArtifactError, match="base:ids: its bytes do not match"):
        _run(plan, only, out, scan=True)
    assert [p for p in out.iterdir() if p.suffix == ".safetensors"] == [] or (
        out / ".journal.jsonl"
    ).exists()


def test_values_are_inspected_while_they_are_copied(out, tmp_path) -> None:
    bad = torch.ones(4, 5)
    bad[1, 2], bad[3, 3] = float("nan"), float("inf")
    big = torch.full((3, 3), 1e6)
    stored = {"bad": bad, "zero": torch.zeros(8), "minus": torch.tensor([-0.0]), "big": big}
    (tmp_path / "plain").mkdir()
    save_file(stored, tmp_path / "plain" / "model.safetensors")
    ops = [copied(name, tensor) for name, tensor in stored.items()]
    ops[3] = replace(ops[3], dtype="F16")
    done = _run(Plan(tuple(ops)), {"base": SourceRef(tmp_path / "plain")}, out)
    assert done.nonfinite == {"bad": 2, "big": 9}
    zero = {name: outcome.all_zero for name, outcome in done.outcomes.items()}
    assert zero == {"bad": False, "zero": True, "minus": True, "big": False}


def test_a_tensor_without_changed_elements_is_reported(inputs, out) -> None:
    plan = make_plan()
    ops = [
        replace(op, terms=(replace(op.terms[0], scale=1e-30),)) if op.name == "wide" else op
        for op in plan.ops
    ]
    done = _run(replace(plan, ops=tuple(ops)), inputs, out)
    assert done.changed["wide"] == 0.0
    assert done.changed["tall"] > 0.9
    assert set(done.changed) == {"wide", "tall", "conv", "bias", "embed"}


def test_changed_elements_are_counted_in_fp32_too(out, tmp_path) -> None:
    stored = {"base": {"w": torch.ones(20, 24)}, "adapter": {"v": torch.eye(20, 24)}}
    for name, state in stored.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    op = Op("w", (20, 24), "F32", "base:w", "F32", terms=(Add("adapter:v", 0.5),))
    done = _run(Plan((op,)), {name: SourceRef(tmp_path / name) for name in stored}, out)
    assert done.changed == {"w": 20 / 480}
    assert torch.equal(state_of(out)["w"], stored["base"]["w"] + 0.5 * stored["adapter"]["v"])


def test_an_input_cut_short_between_plan_and_execution(inputs, out, tmp_path) -> None:
    import shutil

    folder = shutil.copytree(inputs["base"].path, tmp_path / "short")
    refs = {**inputs, "base": SourceRef(folder)}
    sources = open_sources(refs)
    validate(make_plan(), sources)
    os.truncate(folder / "model-00001-of-00002.safetensors", 2000)
    with pytest.raises(ArtifactError, match="became shorter while it was read"):
        execute(make_plan(), sources, out)


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tasks.weights.execute.execute import execute
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.plan.operations import Op, Plan
sources = open_sources({"base": SourceRef(Path(sys.argv[2]))})
ops = [Op(n, i.shape, "F16" if i.dtype == "BF16" else i.dtype, f"base:{n}", i.dtype)
       for n, i in sources["base"].tensors.items()]
execute(Plan(tuple(ops)), sources, Path(sys.argv[3]))
assert "torch" not in sys.modules
"""


def test_copies_and_casts_need_no_torch(inputs, out) -> None:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", WITHOUT_TORCH, str(root), str(inputs["base"].path), str(out)]
    subprocess.run(command, check=True, timeout=60)
    base, _ = tensors()
    assert torch.equal(state_of(out)["wide"], base["wide"].half())


OPTIMISED = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tasks.weights.execute.execute import execute
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import ADAPTER
from tests.weights.plans import make_plan
refs = {"base": SourceRef(Path(sys.argv[2])), "adapter": SourceRef(Path(sys.argv[3]), stem=ADAPTER)}
execute(make_plan(), open_sources(refs), Path(sys.argv[4]))
"""


def test_nothing_is_computed_in_an_assert(inputs, out) -> None:
    root = Path(__file__).resolve().parents[3]
    folders = [root, inputs["base"].path, inputs["adapter"].path, out]
    subprocess.run([sys.executable, "-O", "-c", OPTIMISED, *map(str, folders)], check=True)
    written, wanted = state_of(out), expected()
    assert [name for name in wanted if not torch.equal(written[name], wanted[name])] == []


def test_executed_survives_json(inputs, out) -> None:
    done = _run(make_plan(), inputs, out)
    assert Executed.from_json(json.loads(json.dumps(done.as_json()))) == done


def test_an_empty_folder_is_left_empty_when_nothing_was_finished(inputs, out, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        _run(make_plan(), inputs, out)
    assert list(out.iterdir()) == []


def test_ops_compare_and_serialise() -> None:
    plan = make_plan()
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    sharded = replace(plan, shards=(3, len(plan.ops) - 3))
    assert Plan.from_json(json.loads(json.dumps(sharded.as_json()))) == sharded
    assert Op("a", (2,), "F16", "x:y:z", "F16").key == "y:z"
