from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.weights.execute.kernels import apply
from tasks.weights.plan.adapter_ops import (
    Add,
    Dora,
    LowRank,
    Rows,
    Term,
    needs_all_rows,
    term_as_json,
    term_from_json,
)
from tests.weights.rounding import near

ROWS, COLUMNS, RANK = 40, 24, 3


def _operands(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(RANK, COLUMNS).bfloat16(),
        "b": torch.randn(ROWS, RANK).bfloat16(),
        "turned a": torch.randn(RANK, ROWS),
        "turned b": torch.randn(COLUMNS, RANK),
        "m": torch.rand(ROWS) + 0.5,
        "turned m": torch.rand(COLUMNS) + 0.5,
        "values": torch.randn(3, COLUMNS),
        "value": torch.randn(ROWS, COLUMNS),
    }


OPERANDS = _operands()
TERMS: list[Term] = [
    LowRank("a", "b", 1.7),
    LowRank("turned a", "turned b", 0.3, transpose=True),
    Dora("a", "b", "m", 2.0),
    Dora("turned a", "turned b", "turned m", 2.0, transpose=True),
    Rows("values", (39, 0, 17)),
    Add("value", -0.5),
]


def _whole(term: Term, weight: torch.Tensor) -> torch.Tensor:
    """Apply the formula of a term to the full tensor."""
    get = {name: tensor.float() for name, tensor in OPERANDS.items()}
    match term:
        case LowRank() | Dora():
            product = get[term.b] @ get[term.a]
            new = weight + (product.T if term.transpose else product) * term.scale
            if isinstance(term, LowRank):
                return new
            axis = 0 if term.transpose else 1
            factor = get[term.magnitude] / torch.linalg.norm(new, dim=axis)
            return new * (factor if term.transpose else factor[:, None])
        case Rows():
            new = weight.clone()
            new[list(term.indices)] = get[term.values]
            return new
        case Add():
            return weight + get[term.value] * term.scale


@pytest.mark.parametrize(
    "term", TERMS, ids=lambda term: f"{term.kind}-{getattr(term, 'transpose', '')}"
)
@pytest.mark.parametrize("step", [1, 7, 16, 39, 40])
def test_blocks_give_the_full_tensor(term: Term, step: int) -> None:
    """Includes blocks of one row, for which BLAS uses another routine."""
    weight = torch.randn(ROWS, COLUMNS)
    step = ROWS if needs_all_rows(term) else step
    blocks = [
        apply(term, weight[at : at + step].clone(), start=at, operand=OPERANDS.__getitem__)
        for at in range(0, ROWS, step)
    ]
    assert near(torch.cat(blocks), _whole(term, weight))


def test_a_head_of_one_row() -> None:
    operands = {"a": torch.randn(4, 64), "b": torch.randn(1, 4)}
    weight = torch.randn(1, 64)
    actual = apply(LowRank("a", "b", 0.5), weight.clone(), start=0, operand=operands.__getitem__)
    assert near(actual, weight + (operands["b"] @ operands["a"]) * 0.5)


def test_a_vector() -> None:
    value, bias = torch.randn(ROWS), torch.randn(ROWS)
    actual = apply(Add("v", 3.0), bias[8:20].clone(), start=8, operand=lambda _: value)
    assert torch.equal(actual, (bias + value * 3.0)[8:20])


@pytest.mark.parametrize("step", [1, 37, 96, 288])
@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts(turned: bool, step: int) -> None:
    """Blocks may begin and end within an expert, in the layout of peft's ParamWrapper."""
    experts, rows, columns = 3, 96, 32
    inner, outer = (rows, columns) if turned else (columns, rows)
    a, b = torch.randn(RANK * experts, inner), torch.randn(outer, RANK * experts)
    deltas = torch.einsum(
        "ore,eri->eoi", b.view(outer, RANK, experts), a.view(experts, RANK, inner)
    )
    deltas = deltas.transpose(1, 2) if turned else deltas
    weight = torch.randn(experts, rows, columns)
    term = LowRank("a", "b", 0.7, transpose=turned, experts=experts)
    flat = weight.reshape(-1, columns)
    blocks = [
        apply(term, flat[at : at + step].clone(), start=at, operand={"a": a, "b": b}.__getitem__)
        for at in range(0, len(flat), step)
    ]
    assert near(torch.cat(blocks).view_as(weight), weight + deltas * 0.7)


def test_one_expert_and_a_part_of_it() -> None:
    experts, rows, columns = 4, 10, 6
    a, b = torch.randn(RANK * experts, columns), torch.randn(rows, RANK * experts)
    term = LowRank("a", "b", 2.0, experts=experts)
    stack = torch.zeros(experts * rows, columns)
    operand = {"a": a, "b": b}.__getitem__
    whole = apply(term, stack, start=0, operand=operand).view(experts, rows, columns)
    alone = term.of_expert(2, len(a))
    assert near(apply(alone, torch.zeros(rows, columns), start=0, operand=operand), whole[2])
    lower = replace(alone, out_start=4)
    part = apply(lower, torch.zeros(3, columns), start=1, operand=operand)
    assert near(part, whole[2, 5:8])


@given(st.integers(0, 20), st.integers(1, 20))
@settings(deadline=None)
def test_any_run_of_rows(first: int, count: int) -> None:
    weight = torch.ones(ROWS, COLUMNS)
    for term in TERMS:
        if not needs_all_rows(term):
            block = weight[first : first + count].clone()
            actual = apply(term, block, start=first, operand=OPERANDS.__getitem__)
            assert near(actual, _whole(term, weight)[first : first + count])


@pytest.mark.parametrize("term", TERMS)
def test_terms_survive_json(term: Term) -> None:
    assert term_from_json(term_as_json(term)) == term
