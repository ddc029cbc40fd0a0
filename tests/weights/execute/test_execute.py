"""Executing a plan gives torch's results, for any number of workers, shards and block sizes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
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
from tasks.weights.execute.sinks import Sink
from tasks.weights.execute.task_queue import LARGE, Pending, Task
from tasks.weights.files import file_ranges as extents
from tasks.weights.files.header import TensorInfo, read_header
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.layout import with_output
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.plan.validate import validate
from tests.weights.making import state_of
from tests.weights.plans import copied, expected, make_inputs, make_plan, tensors


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
    assert set(read_checkpoint(out).tensors) == set(wanted), "the index agrees with the files"
    for file in out.glob("*.safetensors"):
        raw = file.read_bytes()
        for name, info in read_header(file).tensors.items():
            assert done.checksums[name] == blake3(raw[info.start : info.end]).hexdigest()
            assert done.outcomes[name].file == file.name


@pytest.mark.parametrize("shard", [None, 40_000, 1])
def test_workers_and_blocks_change_no_byte(
    inputs, tmp_path, monkeypatch: pytest.MonkeyPatch, shard: int | None
) -> None:
    folders = []
    for workers, elements in ((1, 1 << 20), (5, 4096), (2, 300), (1, 1)):
        monkeypatch.setattr(compute, "ELEMENTS", elements)
        monkeypatch.setattr(copying, "BLOCK", 16 * elements)
        out = tmp_path / f"{workers} {elements}"
        out.mkdir()
        done = _run(make_plan(max_shard_bytes=shard), inputs, out, workers=workers)
        assert Executed.from_json(json.loads(json.dumps(done.as_json()))) == done
        folders.append(_files(out))
    assert all(folder == folders[0] for folder in folders)
    edges = [list(compute.row_blocks(rows, 24)) for rows in range(1, 100)]
    for rows, blocks in enumerate(edges, start=1):
        assert (blocks[0][0], blocks[-1][1]) == (0, rows)
        assert all(left[1] == right[0] for left, right in pairwise(blocks))


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


def test_hashes_of_a_manifest_are_trusted_only_while_they_can_be_right(
    inputs, out, tmp_path
) -> None:
    base, _ = tensors()
    plan = Plan(tuple(copied(name, tensor) for name, tensor in base.items()))
    folder = shutil.copytree(inputs["base"].path, tmp_path / "folder")
    path = folder / "manifest.json"
    whole = path.read_text()
    assert read_checkpoint(folder).checksum("wide") is not None

    document = json.loads(whole)
    document["tensors"]["model-00002-of-00002.safetensors"]["ids"]["blake3"] = "0" * 64
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="base:ids"):
        _run(plan, {"base": SourceRef(folder)}, out, scan=True)

    path.write_text(json.dumps({"files": document["files"]}))  # of another tool
    assert read_checkpoint(folder).checksum("wide") is None
    path.write_text(whole)
    later = path.stat().st_mtime + 10
    os.utime(folder / "model-00001-of-00002.safetensors", (later, later))  # touched afterwards
    checkpoint = read_checkpoint(folder)
    assert checkpoint.checksum("wide") is None
    assert checkpoint.checksum("norm") is not None

    path.unlink()
    shutil.rmtree(out)
    out.mkdir()
    done = _run(plan, {"base": SourceRef(folder)}, out)
    assert done.linked == []
    assert done.read == sum(t.nbytes for t in base.values())


def test_where_the_kernel_cannot_copy_python_does(inputs, out, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(extents.os, "copy_file_range", refuse)
    _run(make_plan(), inputs, out)
    wanted = expected()
    assert [n for n, t in state_of(out).items() if not torch.equal(t, wanted[n])] == []


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


def test_an_input_cut_short_between_plan_and_execution(inputs, out, tmp_path) -> None:
    folder = shutil.copytree(inputs["base"].path, tmp_path / "short")
    refs = {**inputs, "base": SourceRef(folder)}
    sources = open_sources(refs)
    validate(make_plan(), sources)
    os.truncate(folder / "model-00001-of-00002.safetensors", 2000)
    with pytest.raises(ArtifactError, match="model-00001-of-00002"):
        execute(make_plan(), sources, out)


def test_the_largest_tensors_are_first_and_few_large_ones_run_at_a_time() -> None:
    def task(name: str, rows: int, memory: int = 0) -> Task:
        op = Op(name, (rows,), "BF16", f"base:{name}", "F32")
        place = Sink(-1, Path("out"), TensorInfo((rows,), "BF16", 0, 2 * rows))
        return Task(op, place, None, None, memory)

    pending = Pending([task(str(rows), rows) for rows in (1, 30, 20)])
    assert [pending.take().op.name for _ in range(3)] == ["30", "20", "1"]
    assert pending.take() is None

    tasks = [task(str(index), 9, LARGE + 1) for index in range(3)]
    pending, third = Pending(tasks), []
    first, _ = pending.take(), pending.take()
    waiting = threading.Thread(target=lambda: third.append(pending.take()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    pending.done(first)
    waiting.join(10)
    assert third == [tasks[2]]

    closing = Pending(tasks)
    closing.take(), closing.take()
    waiting = threading.Thread(target=closing.take)
    waiting.start()
    closing.close()
    waiting.join(10)
    assert not waiting.is_alive()
