"""Invalid plans: every finding in one error, before a byte is read."""

from __future__ import annotations

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
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Rows, Term
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


CHANGES: list[tuple[str, dict[str, object], str]] = [
    ("wide", {"source": "base:widee"}, "near: wide"),
    ("wide", {"source": "bases:wide"}, "'bases'"),
    ("wide", {"source_dtype": "F16"}, "base:wide is BF16, planned as F16"),
    ("wide", {"shape": (33, 1031)}, "BF16 [33, 1031]"),
    ("wide", {"shape": (1030, 33)}, "[1030, 33]"),
    ("wide", {"shape": (32, 1030)}, "elements 32960 to 33990"),
    ("wide", {"shape": (0, 1030)}, "BF16 [0, 1030]"),
    ("wide", {"name": "tall"}, "tall: planned 2 times"),
    ("ids", {"dtype": "F32"}, "ids: I64"),
    ("norm", {"dtype": "BF17"}, "norm: unknown dtype BF17"),
    ("norm", {"transpose": True}, "norm: [24]"),
    ("expert.1", {"start": 0}, "expert.0 and by expert.1"),
    ("expert.2", {"start": 600}, "elements 600 to 840"),
    ("wide", {"terms": ()}, "adapter:wide.A: BF16 [5, 1030]"),
    ("ids", {"terms": (Add("adapter:bias.B", 1.0),)}, "ids: I64"),
]
PAIR = ("adapter:tall.A", "adapter:tall.B")


TERMS: list[tuple[str, Term, str]] = [
    ("tall", LowRank(*PAIR, 0.0), "scale 0.0"),
    ("tall", LowRank(*PAIR, float("nan")), "scale nan"),
    ("tall", LowRank("adapter:tall.A", "adapter:wide.B", 1.0), "ranks 4 and 5"),
    ("tall", LowRank(*PAIR, 1.0, transpose=True), "[24, 1031]"),
    ("tall", LowRank(*PAIR, 1.0, out_start=1), "rows 1 to 1032"),
    ("tall", LowRank(*PAIR, 1.0, a_rows=(0, 3, 1)), "ranks 3 and 4"),
    ("tall", LowRank(*PAIR, 1.0, experts=3), "3 experts"),
    ("bias", LowRank(*PAIR, 1.0), "[33]"),
    ("tall", LowRank("adapter:gone", PAIR[1], 1.0), "adapter has no gone"),
    ("tall", LowRank("base:ids", PAIR[1], 1.0), "base:ids: I64"),
    ("tall", Dora(*PAIR, "adapter:bias.B", 1.0), "[1031]"),
    ("embed", Rows("adapter:rows", (1,)), "[1, 24]"),
    ("embed", Rows("adapter:rows", (1, 70)), "row 70"),
    ("embed", Rows("adapter:rows", (1, 1)), "row"),
    ("embed", Add("adapter:rows", 1.0), "[70, 24]"),
]


def test_operations_and_terms_that_do_not_fit_are_named(inputs) -> None:
    assert _findings(make_plan(), inputs) == []
    assert _findings(Plan(()), inputs)
    quantised = {"type": "nf4", "base": "dequantized"}  # a QLoRA merge reads a plain base, too
    plans = [(_with(name, **changes), thing) for name, changes, thing in CHANGES]
    plans += [
        (_with(name, **{"quantization": quantised, **changes}), thing)
        for name, changes, thing in CHANGES
    ]
    plans += [(_with(name, terms=(term,)), thing) for name, term, thing in TERMS]
    missed = []
    for plan, thing in plans:
        findings = _findings(plan, inputs)
        if not any(thing in line for line in findings):
            missed.append((thing, findings))
    assert missed == []
    several = _with("wide", source="base:none", terms=())
    several = replace(several, ops=(*several.ops, several.ops[-1]), shards=(1,))
    sources = open_sources(inputs)
    with pytest.raises(ContractError) as caught:
        validate(several, sources)
    for thing in ("expert.2", "shards", "base has no none", "base:wide", "adapter:wide.B"):
        assert thing in caught.value.report()


def test_an_unused_tensor_has_to_be_dropped_for_a_reason(inputs) -> None:
    plan = make_plan()
    without = replace(plan, ops=tuple(op for op in plan.ops if op.name != "ids"))
    assert [line.partition(": ")[0] for line in _findings(without, inputs)] == ["base:ids"]
    dropped = replace(without, dropped=(Dropped("base:ids", "a buffer"),))
    assert _findings(dropped, inputs) == []
    both = replace(plan, dropped=(Dropped("base:ids", "a buffer"),))
    assert [line.partition(": ")[0] for line in _findings(both, inputs)] == ["base:ids"]
    gone = replace(plan, dropped=(Dropped("base:idss", "a buffer"),))
    assert [line.partition(": ")[0] for line in _findings(gone, inputs)] == ["base:idss"]


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
    tail = [op for op in ops if base.files[op.name] == second]
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
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
