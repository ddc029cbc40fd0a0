"""Invalid plans and shards of ranks: every finding in one error, before a byte is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.files.tensors import Tensors
from tasks.weights.plan import LowRank, Plan, plan_findings, validate
from tasks.weights.shards import rank_file, read_partitions
from tests.weights.making import NF4, Spread, alter_ranks, write_shards
from tests.weights.plans import make_inputs, make_plan


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _findings(plan: Plan, inputs: dict[str, Tensors]) -> list[str]:
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


NAMES = ("w", "tiny", "matrix")


def _parameters(sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    values = torch.arange(sum(sizes) + 1, dtype=torch.float32).to(torch.bfloat16)
    shapes = {"w": (sizes[0],), "tiny": (sizes[1],), "matrix": (sizes[2], 3)}
    return {n: values[: torch.Size(s).numel()].reshape(s).clone() for n, s in shapes.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_shards(tmp_path / "run", _parameters((10, 2, 4)), Spread(world_size=2))
    return tmp_path / "run"


def _message(run: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        read_partitions(run)
    return caught.value.report()


def test_all_findings_come_at_once(run: Path) -> None:
    def shrink(tensors: dict, table: dict) -> None:
        tensors["w"], table["w"]["end"] = tensors["w"][:3].clone(), 3

    def spoil(tensors: dict, table: dict) -> None:
        tensors["w"] = tensors["w"].float()
        table["tiny"]["shape"] = [3]
        tensors["unknown"], table["unknown"] = torch.zeros(1), {"shape": [1], "start": 0, "end": 1}
        del table["matrix"]

    alter_ranks(run, 2, [0], shrink)
    assert "elements 3 to 5" in _message(run)
    alter_ranks(run, 2, [1], lambda tensors, table: table["w"].update(start=2, end=7))
    assert rank_file(1, 2) in _message(run)
    alter_ranks(run, 2, [0], spoil)
    (run / "shards" / "rank-00007-of-00002.safetensors").write_bytes(b"")
    text = _message(run)
    for thing in ("w: F32", "tiny [3]", "unknown", "matrix", "rank-00007-of-00002"):
        assert thing in text
    (run / "shards" / rank_file(1, 2)).unlink()
    assert rank_file(1, 2) in _message(run)
