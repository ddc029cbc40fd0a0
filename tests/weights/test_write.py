"""Plans of tensors: invalid ones are refused, the others written as torch computes them."""

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

from tasks.core.errors import ArtifactError, ContractError
from tasks.pipeline.artifact import Origin, open_artifact, publish, staging, verify
from tasks.weights import plan as plans
from tasks.weights import write as writing
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.reader import ADAPTER, files_of, read_checkpoint, read_header
from tasks.weights.files.tensors import Tensors
from tasks.weights.plan import LowRank, Op, Plan, Rows, as_is, plan_findings, validate
from tasks.weights.write import lay_out, out_file, write
from tests.weights.making import NF4, rounded_alike, state_of

Inputs = dict[str, Tensors]
WORDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}
SCALE = 1.7


def tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a base and an adapter whose widths and heights no block size divides."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    base = {
        "embed": draw(70, 24).bfloat16(),
        "wide": draw(33, 1030).bfloat16(),
        "tall": draw(1031, 24).bfloat16(),
        "conv": draw(24, 72).bfloat16(),
        "bias": draw(33).bfloat16(),
        "norm": draw(24),
        "fused": draw(3, 10, 24).bfloat16(),
        "ids": torch.arange(7),
        "dora": draw(33, 70).bfloat16(),
        "stack": draw(3, 24, 16).bfloat16(),
    }
    adapter = {
        "wide.A": draw(5, 1030).bfloat16(), "wide.B": draw(33, 5).bfloat16(),
        "tall.A": draw(4, 24), "tall.B": draw(1031, 4),
        "conv.A": draw(4, 24), "conv.B": draw(72, 4),
        "rows": draw(2, 24),
        "dora.A": draw(4, 70), "dora.B": draw(33, 4), "dora.m": draw(33).abs(),
        "stack.A": draw(6, 16), "stack.B": draw(24, 6),
    }  # fmt: skip
    return base, adapter


def make_inputs(root: Path) -> dict[str, Tensors]:
    """Publish both as artifacts, so that their hashes are known; the base in two files."""
    base, adapter = tensors()
    first = {name: base[name] for name in ("embed", "wide", "tall", "conv")}
    second = {name: base[name] for name in base if name not in first}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    with staging(root / "base") as work:
        for file, contents in files.items():
            save_file(contents, work / file)
        index = {name: file for file, contents in files.items() for name in contents}
        path = work / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
        publish(work, root / "base", Origin("base", "test", "base"))
    with staging(root / "adapter") as work:
        save_file(adapter, work / "adapter_model.safetensors")
        publish(work, root / "adapter", Origin("adapter", "test", "adapter"))
    return {
        "base": read_checkpoint(root / "base"),
        "adapter": read_checkpoint(root / "adapter", ADAPTER),
    }


def pair(name: str, **settings: object) -> LowRank:
    return LowRank(f"adapter:{name}.A", f"adapter:{name}.B", SCALE, **settings)


def copied(name: str, tensor: torch.Tensor) -> Op:
    word = WORDS[tensor.dtype]
    return Op(name, tuple(tensor.shape), word, f"base:{name}", word)


def make_plan(*, max_shard_bytes: int | None = 40_000) -> Plan:
    """Return a plan with one operation of every kind."""
    base, _ = tensors()
    ops = {name: copied(name, tensor) for name, tensor in base.items()}

    def changed(name: str, *terms: object) -> Op:
        op = ops[name]
        return Op(name, op.shape, op.dtype, op.source, op.source_dtype, terms=terms)

    ops["wide"] = changed("wide", pair("wide"))
    ops["tall"] = changed("tall", pair("tall"))
    ops["conv"] = changed("conv", pair("conv", transpose=True))
    ops["embed"] = changed("embed", Rows("adapter:rows", (0, 69)))
    ops["dora"] = changed("dora", pair("dora", magnitude="adapter:dora.m"))
    ops["stack"] = changed("stack", pair("stack", experts=3))
    ops["norm"] = Op("norm", (24,), "BF16", "base:norm", "F32")
    del ops["fused"]
    for expert in range(3):
        name = f"expert.{expert}"
        turned = expert == 2
        ops[name] = Op(
            name, (24, 10) if turned else (10, 24), "BF16", "base:fused", "BF16",
            start=expert * 240, transpose=turned,
        )  # fmt: skip
    return Plan(tuple(ops.values()), max_shard_bytes=max_shard_bytes)


def expected() -> dict[str, torch.Tensor]:
    """Return the plan's results, computed on full tensors by torch."""
    base, adapter = tensors()
    results = dict(base)
    for name in ("wide", "tall", "conv"):
        change = (adapter[f"{name}.B"].float() @ adapter[f"{name}.A"].float()) * SCALE
        change = change.T if name == "conv" else change
        results[name] = (base[name].float() + change).bfloat16()
    results["embed"] = base["embed"].clone()
    results["embed"][[0, 69]] = adapter["rows"].bfloat16()
    wide = base["dora"].float() + (adapter["dora.B"] @ adapter["dora.A"]) * SCALE
    factor = adapter["dora.m"] / torch.linalg.norm(wide, dim=1)
    results["dora"] = (wide * factor[:, None]).bfloat16()
    # In peft's layout every third column of B belongs to one expert.
    parts = (adapter["stack.B"][:, e::3] @ adapter["stack.A"][2 * e :][:2] for e in range(3))
    change = torch.stack(list(parts)) * SCALE
    results["stack"] = (base["stack"].float() + change).bfloat16()
    results["norm"] = base["norm"].bfloat16()
    fused = results.pop("fused")
    for expert in range(3):
        results[f"expert.{expert}"] = fused[expert].T if expert == 2 else fused[expert]
    return results


LOOSE = {"dora", "stack"}
"""Tensors with norms or several experts, whose sums may be rounded otherwise."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _findings(plan: Plan, inputs: Inputs) -> list[str]:
    return list(plan_findings(plan, inputs))


def _with(which: str, **changes: object) -> Plan:
    """Return the valid plan with one operation changed."""
    plan = make_plan()
    return replace(
        plan, ops=tuple(replace(op, **changes) if op.name == which else op for op in plan.ops)
    )


CHANGES: list[tuple[str, dict[str, object], str]] = [
    ("wide", {"source": "base:widee"}, "base has no widee"),
    ("wide", {"source_dtype": "F16"}, "base:wide is BF16, planned as F16"),
    ("wide", {"shape": (33, 1031)}, "BF16 [33, 1031]"),
    ("wide", {"shape": (32, 1030)}, "elements 32960 to 33990"),
    ("wide", {"shape": (0, 1030)}, "BF16 [0, 1030]"),
    ("wide", {"name": "tall"}, "tall: planned 2 times"),
    ("ids", {"dtype": "F32"}, "ids: I64"),
    ("norm", {"dtype": "BF17"}, "norm: unknown dtype BF17"),
    ("norm", {"transpose": True}, "norm: [24]"),
    ("expert.1", {"start": 0}, "expert.0 and by expert.1"),
    ("expert.2", {"start": 600}, "elements 600 to 840"),
    ("wide", {"terms": ()}, "adapter:wide.A: BF16 [5, 1030]"),
    ("ids", {"terms": (LowRank("adapter:tall.A", "adapter:tall.B", 1.0),)}, "ids: I64"),
    ("tall", {"terms": (LowRank("adapter:gone", "adapter:tall.B", 1.0),)}, "adapter has no gone"),
    ("tall", {"terms": (LowRank("base:ids", "adapter:tall.B", 1.0),)}, "base:ids: I64"),
]
# A base that is quantised as in training is covered as exactly as any other.
CHANGES += [
    (name, {**changes, "quantization": NF4}, thing)
    for name, changes, thing in CHANGES
    if name == "wide"
]


def test_operations_and_terms_that_do_not_fit_are_named(inputs) -> None:
    assert _findings(make_plan(), inputs) == []
    assert _findings(Plan(()), inputs)
    plans = [(_with(name, **changes), thing) for name, changes, thing in CHANGES]
    missed = []
    for plan, thing in plans:
        findings = _findings(plan, inputs)
        if not any(thing in line for line in findings):
            missed.append((thing, findings))
    assert missed == []
    several = _with("wide", source="base:none", terms=())
    several = replace(several, ops=(*several.ops, several.ops[-1]))
    with pytest.raises(ContractError) as caught:
        validate(several, inputs)
    for thing in ("expert.2", "base has no none", "base:wide", "adapter:wide.B"):
        assert thing in caught.value.report()


def test_an_unused_tensor_has_to_be_dropped_for_a_reason(inputs) -> None:
    plan = make_plan()
    without = replace(plan, ops=tuple(op for op in plan.ops if op.name != "ids"))
    assert _findings(replace(without, dropped={"base:ids": "a buffer"}), inputs) == []
    both = replace(plan, dropped={"base:ids": "a buffer"})
    gone = replace(plan, dropped={"base:idss": "a buffer"})
    for wrong, name in ((without, "base:ids"), (both, "base:ids"), (gone, "base:idss")):
        assert [line.partition(": ")[0] for line in _findings(wrong, inputs)] == [name]


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
        patch.setattr("shutil.disk_usage", lambda _: Usage)
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
