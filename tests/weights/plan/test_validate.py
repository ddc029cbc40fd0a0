"""Invalid plans: every finding in one error, before a byte is read."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.execute.execute import execute
from tasks.weights.execute.writer import Spec
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Rows
from tasks.weights.plan.layout import lay_out, with_output
from tasks.weights.plan.operations import Dropped, Op, Plan
from tasks.weights.plan.validate import plan_findings, validate
from tests.weights.making import state_of
from tests.weights.plans import expected, make_inputs, make_plan


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceRef]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _findings(plan: Plan, inputs: dict[str, SourceRef]) -> list[str]:
    sources = open_sources(inputs)
    return list(plan_findings(plan, sources))


def _with(which: str, **changes: object) -> Plan:
    """Return the valid plan with one operation changed."""
    plan = make_plan()
    return replace(
        plan, ops=tuple(replace(op, **changes) if op.name == which else op for op in plan.ops)
    )


def test_the_good_plan_has_no_findings(inputs) -> None:
    assert _findings(make_plan(), inputs) == []


@pytest.mark.parametrize(
    ("name", "changes", "finding"),
    [
        ("wide", {"source": "base:widee"}, "wide: base has no widee; near: wide"),
        ("wide", {"source": "bases:wide"}, "no input 'bases' (inputs: base, adapter)"),
        ("wide", {"source_dtype": "F16"}, "base:wide is BF16, planned as F16"),
        ("wide", {"shape": (33, 1031)}, "wide: needs BF16 [33, 1031], base:wide is BF16"),
        ("wide", {"shape": (1030, 33)}, "wide: must be [1030, 33], base:wide is [33, 1030]"),
        ("wide", {"shape": (32, 1030)}, "base:wide: elements 32960 to 33990 are used by nothing"),
        ("wide", {"shape": (0, 1030)}, "wide: BF16 [0, 1030] has no elements"),
        ("wide", {"name": "tall"}, "tall: planned 2 times"),
        ("ids", {"dtype": "F32"}, "ids: I64 cannot be cast to F32"),
        ("norm", {"dtype": "BF17"}, "norm: unknown dtype BF17"),
        ("norm", {"transpose": True}, "norm: [24] cannot be transposed"),
        ("expert.1", {"start": 0}, "base:fused: is used by expert.0 and by expert.1"),
        ("expert.2", {"start": 600}, "expert.2: needs elements 600 to 840, base:fused is"),
        ("wide", {"terms": ()}, "adapter:wide.A: BF16 [5, 1030] is used by nothing"),
        ("ids", {"terms": (Add("adapter:bias.B", 1.0),)}, "ids: I64 is not a float dtype"),
    ],
)
def test_an_operation_that_does_not_fit_is_named(inputs, name, changes, finding) -> None:
    assert any(finding in line for line in _findings(_with(name, **changes), inputs))
    quantised = {"type": "nf4", "base": "dequantized"}  # a QLoRA merge reads a plain base, too
    plan = _with(name, **{"quantization": quantised, **changes})
    assert any(finding in line for line in _findings(plan, inputs))


PAIR = ("adapter:tall.A", "adapter:tall.B")


@pytest.mark.parametrize(
    ("name", "term", "finding"),
    [
        ("tall", LowRank(*PAIR, 0.0), "scale 0.0 is not a finite number"),
        ("tall", LowRank(*PAIR, float("nan")), "scale nan is not a finite number"),
        ("tall", LowRank("adapter:tall.A", "adapter:wide.B", 1.0), "have ranks 4 and 5"),
        (
            "tall",
            LowRank(*PAIR, 1.0, transpose=True),
            "make [24, 1031], but the output needs rows 0 to",
        ),
        ("tall", LowRank(*PAIR, 1.0, out_start=1), "output needs rows 1 to 1032 of 24 columns"),
        ("tall", LowRank(*PAIR, 1.0, a_rows=(0, 3, 1)), "have ranks 3 and 4"),
        ("tall", LowRank(*PAIR, 1.0, experts=3), "rank 4 is not divisible by 3 experts"),
        ("bias", LowRank(*PAIR, 1.0), "not a LoRA pair for [33]"),
        ("tall", LowRank("adapter:gone", PAIR[1], 1.0), "adapter has no gone"),
        ("tall", LowRank("base:ids", PAIR[1], 1.0), "base:ids: I64 is not a float dtype"),
        ("tall", Dora(*PAIR, "adapter:bias.B", 1.0), "magnitudes must be [1031]"),
        ("embed", Rows("adapter:rows", (1,)), "adapter:rows: is [2, 24], must be [1, 24]"),
        ("embed", Rows("adapter:rows", (1, 70)), "row 70 is outside [70, 24]"),
        ("embed", Rows("adapter:rows", (1, 1)), "names a row more than once"),
        ("embed", Add("adapter:rows", 1.0), "adapter:rows: is [2, 24], must be [70, 24]"),
    ],
)
def test_a_term_that_does_not_fit_is_named(inputs, name, term, finding) -> None:
    assert any(finding in line for line in _findings(_with(name, terms=(term,)), inputs))


def test_an_unused_tensor_has_to_be_dropped_for_a_reason(inputs) -> None:
    plan = make_plan()
    without = replace(plan, ops=tuple(op for op in plan.ops if op.name != "ids"))
    assert _findings(without, inputs) == ["base:ids: I64 [7] is used by nothing"]
    dropped = replace(without, dropped=(Dropped("base:ids", "a buffer"),))
    assert _findings(dropped, inputs) == []
    both = replace(plan, dropped=(Dropped("base:ids", "a buffer"),))
    assert _findings(both, inputs) == [
        "base:ids: to be dropped, but also used or dropped elsewhere"
    ]
    gone = replace(plan, dropped=(Dropped("base:idss", "a buffer"),))
    assert _findings(gone, inputs) == ["base:idss: to be dropped, but it is in no input"]


def test_all_findings_come_in_one_error(inputs) -> None:
    plan = _with("wide", source="base:none", terms=())
    plan = replace(plan, ops=(*plan.ops, plan.ops[-1]), shards=(1,))
    sources = open_sources(inputs)
    with pytest.raises(ContractError) as caught:
        validate(plan, sources)
    text = caught.value.report()
    for finding in (
        "expert.2: planned 2 times",
        "shards are for 1 tensors, but the plan has 11",
        "base has no none",
        "base:wide: BF16 [33, 1030] is used by nothing",
        "adapter:wide.B: BF16 [33, 5] is used by nothing",
    ):
        assert finding in text


def test_an_empty_plan_is_refused(inputs) -> None:
    assert "the plan has no operations" in _findings(Plan(()), inputs)


def test_too_little_disk_is_an_error_of_its_own(inputs, tmp_path, monkeypatch) -> None:
    from tasks.weights.execute import writer

    class Usage:
        free = 1000

    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: Usage)
    sources = open_sources(inputs)
    validate(make_plan(), sources)
    with pytest.raises(ArtifactError, match="are free"):
        validate(make_plan(), sources, out=tmp_path)


def test_output_keeps_the_inputs_files_where_they_fit(inputs) -> None:
    names = [("a", 3), ("b", 4), ("c", 5)]
    ops = tuple(Op(name, (size,), "BF16", f"base:{name}", "BF16") for name, size in names)
    files = {"a": "one", "b": "one", "c": "two"}
    kept = with_output(Plan(ops), dtype="BF16", max_shard_bytes=14, files=files)
    assert kept.shards == (2, 1)
    small = with_output(Plan(ops), dtype="BF16", max_shard_bytes=13, files=files)
    assert (small.shards, small.max_shard_bytes) == (None, 13)
    wide = with_output(Plan(ops), dtype="F32", max_shard_bytes=100, files=files)
    assert wide.shards is None
    assert {op.dtype for op in wide.ops} == {"F32"}
    mixed = {"a": "one", "b": "two", "c": "one"}
    assert with_output(Plan(ops), dtype=None, max_shard_bytes=99, files=mixed).shards is None


def test_a_file_is_linked_only_when_it_is_the_same_in_everything(inputs) -> None:
    second = "model-00002-of-00002.safetensors"
    sources = open_sources(inputs)
    base = sources["base"]
    specs = [Spec(n, tuple(i.shape), i.dtype) for n, i in base.tensors.items()]
    ops = [Op(s.name, s.shape, s.dtype, f"base:{s.name}", s.dtype) for s in specs]
    tail = [op for op in ops if op.name in ("bias", "norm", "fused", "ids")]
    assert lay_out(Plan(tuple(tail)), sources)[0].link == inputs["base"].path / second
    assert lay_out(Plan(tuple(reversed(tail))), sources)[0].link is not None
    for changed in (
        tail[:-1],
        [*tail, ops[0]],
        [replace(tail[0], name="renamed"), *tail[1:]],
        [replace(op, dtype="F16") if op.name == "norm" else op for op in tail],
    ):
        assert lay_out(Plan(tuple(changed)), sources)[0].link is None


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_input_is_an_error_or_the_same_result(inputs, tmp_path, data) -> None:
    """Changes any byte of a header, or the file's length."""
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(inputs["base"].path, folder)
    path = folder / "model-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(raw[:8], "little")
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        at = data.draw(st.integers(0, head - 1))
        raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    out = folder / "out"
    out.mkdir()
    refs = {**inputs, "base": SourceRef(folder)}
    try:
        sources = open_sources(refs)
        validate(make_plan(), sources)
        execute(make_plan(), sources, out, workers=1)
    except (ArtifactError, ContractError):
        return
    wanted = expected()
    assert [n for n, t in state_of(out).items() if not torch.equal(t, wanted[n])] == []


def test_the_plan_in_a_manifest_reads_back(tmp_path: Path) -> None:
    plan = make_plan()
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_json()))
    assert Plan.from_json(json.loads((tmp_path / "plan.json").read_text())) == plan


def test_a_plan_for_another_model_is_refused_fast(tmp_path: Path) -> None:
    """Thousands of keys are missing, but near matches are searched only for a few."""
    names = [f"model.layers.{n}.mlp.experts.up_proj.weight" for n in range(2_000)]
    tensors = {name: torch.ones(1, dtype=torch.bfloat16) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    source = read_checkpoint(tmp_path)
    plan = Plan(tuple(Op(n, (1,), "BF16", f"base:{n}s", "BF16") for n in names))
    started = time.process_time()
    findings = list(plan_findings(plan, {"base": source}))
    assert time.process_time() - started < 5  # minutes with a suggestion each
    assert sum("has no" in line for line in findings) == len(names)
    assert sum("near: " in line for line in findings) == 5
