"""Writing a plan gives torch's results for any workers and blocks; a failure leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin, open_artifact, publish, staging, verify
from tasks.weights import plan as plans
from tasks.weights import write as writing
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.reader import files_of, read_checkpoint, read_header
from tasks.weights.files.tensors import Tensors
from tasks.weights.plan import Op, Plan, as_is
from tasks.weights.write import lay_out, out_file, write
from tests.weights.making import state_of
from tests.weights.plans import copied, expected, make_inputs, make_plan, tensors
from tests.weights.rounding import rounded_alike

Inputs = dict[str, Tensors]
LOOSE = {"dora", "stack"}
"""Tensors with norms or several experts, whose sums may be rounded otherwise."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _wrong(out: Path) -> list[str]:
    """Return the tensors that are not torch's results."""
    written, wanted = state_of(out), expected()
    assert written.keys() == wanted.keys()
    return [
        name
        for name, tensor in wanted.items()
        if not (rounded_alike if name in LOOSE else torch.equal)(written[name], tensor)
    ]


def _copy(inputs: Inputs, folder: Path) -> Path:
    return Path(shutil.copytree(inputs["base"]["wide"].extents[0].path.parent, folder))


def test_every_kind_of_operation_bit_for_bit(inputs, out) -> None:
    done = write(make_plan(), inputs, out)
    assert _wrong(out) == []
    assert len(list(out.glob("*.safetensors"))) > 2
    assert set(read_checkpoint(out)) == set(expected()), "the index agrees with the files"
    for file in out.glob("*.safetensors"):
        raw = file.read_bytes()
        for name, tensor in read_header(file).tensors.items():
            (extent,) = tensor.extents
            stored = raw[extent.start : extent.start + extent.nbytes]
            assert done.checksums[name] == blake3(stored).hexdigest()
            assert done.tensors[name].file == file.name


@pytest.mark.parametrize("shard", [None, 40_000, 1])
def test_workers_and_blocks_change_no_byte(inputs, tmp_path, monkeypatch, shard) -> None:
    """Blocks begin and end within experts; for blocks of one row BLAS uses another routine."""
    sums = []
    for workers, elements in ((1, 1 << 20), (5, 4096), (2, 300), (1, 1)):
        monkeypatch.setattr(plans, "ELEMENTS", elements)
        monkeypatch.setattr(writing, "BLOCK", 16 * elements)
        out = tmp_path / f"{workers} {elements}"
        out.mkdir()
        done = write(make_plan(max_shard_bytes=shard), inputs, out, workers=workers)
        assert pickle.loads(pickle.dumps(done)) == done
        assert _wrong(out) == []
        sums.append({name: text for name, text in done.checksums.items() if name not in LOOSE})
    assert all(each == sums[0] for each in sums)


def test_hashes_of_a_manifest_are_trusted_only_while_they_can_be_right(
    inputs, out, tmp_path
) -> None:
    base, _ = tensors()
    plan = Plan(tuple(copied(name, tensor) for name, tensor in base.items()))
    folder = _copy(inputs, tmp_path / "folder")
    path = folder / "manifest.json"
    whole = path.read_text()
    assert read_checkpoint(folder)["wide"].hash is not None

    document = json.loads(whole)
    document["tensors"]["model-00002-of-00002.safetensors"]["ids"]["blake3"] = "0" * 64
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="base:ids"):
        write(plan, {"base": read_checkpoint(folder)}, out, scan=True)

    path.write_text(json.dumps({"files": document["files"]}))  # of another tool
    assert read_checkpoint(folder)["wide"].hash is None
    path.write_text(whole)
    later = path.stat().st_mtime + 10
    os.utime(folder / "model-00001-of-00002.safetensors", (later, later))  # touched afterwards
    checkpoint = read_checkpoint(folder)
    assert checkpoint["wide"].hash is None
    assert checkpoint["norm"].hash is not None


def test_values_are_inspected_while_they_are_copied(out, tmp_path) -> None:
    bad = torch.ones(4, 5)
    bad[1, 2], bad[3, 3] = float("nan"), float("inf")
    big = torch.full((3, 3), 1e6)
    stored = {"bad": bad, "zero": torch.zeros(8), "minus": torch.tensor([-0.0]), "big": big}
    (tmp_path / "plain").mkdir()
    save_file(stored, tmp_path / "plain" / "model.safetensors")
    ops = [copied(name, tensor) for name, tensor in stored.items()]
    ops[3] = replace(ops[3], dtype="F16")
    done = write(Plan(tuple(ops)), {"base": read_checkpoint(tmp_path / "plain")}, out)
    bad = {name: each.nonfinite for name, each in done.tensors.items() if each.nonfinite}
    assert bad == {"bad": 2, "big": 9}
    zero = {name: each.all_zero for name, each in done.tensors.items()}
    assert zero == {"bad": False, "zero": True, "minus": True, "big": False}


def test_a_file_is_linked_only_when_it_is_the_same_in_everything(inputs) -> None:
    base = inputs["base"]
    ops, second = as_is(base, "base").ops, "model-00002-of-00002.safetensors"
    tail = [op for op in ops if files_of(base)[op.name] == second]
    assert lay_out(Plan(tuple(tail)), inputs)[0].link == base["norm"].extents[0].path
    assert lay_out(Plan(tuple(reversed(tail))), inputs)[0].link is not None
    for changed in (
        tail[:-1],
        [*tail, ops[0]],
        [replace(tail[0], name="renamed"), *tail[1:]],
        [replace(op, dtype="F16") if op.name == "norm" else op for op in tail],
    ):
        assert lay_out(Plan(tuple(changed)), inputs)[0].link is None


def test_a_failed_write_leaves_nothing_and_the_next_has_the_same_bytes(
    inputs, tmp_path, monkeypatch
) -> None:
    def made(name: str) -> dict[str, bytes]:
        with staging(tmp_path / name) as work:
            done = write(make_plan(), inputs, work, workers=1)
            publish(work, tmp_path / name, Origin("weights", "test", "made"), done.hashes)
        assert verify(open_artifact(tmp_path / name)) == []
        files = (tmp_path / name).glob("*.safetensors")
        return {path.name: path.read_bytes() for path in files}

    real, calls = os.pwrite, []

    def failing(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) > 8:
            raise OSError(5, os.strerror(5))
        return real(*arguments)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    reference = made("reference")
    for fault, error in ((failing, ArtifactError), (interrupted, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fault)
            with pytest.raises(error):
                made("made")
        assert [path.name for path in tmp_path.iterdir()] == ["reference"]

    class Usage:
        free = 1000

    with monkeypatch.context() as patch:
        patch.setattr(writing.shutil, "disk_usage", lambda _: Usage)
        with pytest.raises(ArtifactError, match="free"):
            made("made")
    assert made("made") == reference


def test_an_input_that_was_linked_is_never_written_to(inputs, out, tmp_path) -> None:
    """The staging folder still contains a link to an input, and this run has to write that file."""
    folder = _copy(inputs, tmp_path / "folder")
    victim = folder / "model-00001-of-00002.safetensors"
    before = victim.read_bytes()
    sources = {**inputs, "base": read_checkpoint(folder)}
    first = lay_out(make_plan(), sources)[0].name
    os.link(victim, out / first)
    write(make_plan(), sources, out)
    assert victim.read_bytes() == before
    assert (out / first).stat().st_nlink == 1
    os.truncate(victim, 2000)
    with pytest.raises(ArtifactError, match="model-00001-of-00002"):
        write(make_plan(), sources, out)


KINDS = st.tuples(st.sampled_from(sorted(ITEM_BITS)), st.lists(st.integers(0, 5), max_size=3))


@settings(max_examples=30, deadline=None)
@given(kinds=st.lists(KINDS, max_size=12))
def test_safetensors_reads_a_planned_header(tmp_path_factory, kinds) -> None:
    from safetensors import safe_open

    ops = [Op(f"t{i}", tuple(shape), dtype, "", dtype) for i, (dtype, shape) in enumerate(kinds)]
    planned = out_file("model.safetensors", ops)
    path = tmp_path_factory.mktemp("planned") / planned.name
    path.write_bytes(planned.head + bytes(planned.size - len(planned.head)))
    stored = read_header(path).tensors
    assert {name: t.extents[0].start for name, t in stored.items()} == planned.starts
    for name, start in planned.starts.items():
        assert start % (ITEM_BITS[stored[name].dtype] // 8) == 0  # aligned to its own width
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {op.name for op in ops}
        assert file.metadata() == {"format": "pt"}
