"""Terms of a merge, applied to blocks of rows, give the formula on the full tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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


def _operands() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
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


def _full(term: Term, weight: torch.Tensor) -> torch.Tensor:
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
def test_blocks_of_any_height_give_the_full_tensor(term: Term) -> None:
    """Includes blocks of one row, for which BLAS uses another routine."""
    assert term_from_json(term_as_json(term)) == term
    weight = torch.randn(ROWS, COLUMNS)
    for step in (ROWS,) if needs_all_rows(term) else (1, 7, 39, ROWS):
        blocks = [
            apply(term, weight[at : at + step].clone(), start=at, operand=OPERANDS.__getitem__)
            for at in range(0, ROWS, step)
        ]
        assert near(torch.cat(blocks), _full(term, weight)), step


@pytest.mark.parametrize("step", [1, 37, 96])
@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts(turned: bool, step: int) -> None:
    """Blocks may begin and end within an expert, in the layout of peft's ParamWrapper."""
    experts, rows, columns = 3, 96, 32
    inner, outer = (rows, columns) if turned else (columns, rows)
    a, b = torch.randn(RANK * experts, inner), torch.randn(outer, RANK * experts)
    stacks = b.view(outer, RANK, experts), a.view(experts, RANK, inner)
    deltas = torch.einsum("ore,eri->eoi", *stacks)
    deltas = deltas.transpose(1, 2) if turned else deltas
    weight = torch.randn(experts, rows, columns)
    term = LowRank("a", "b", 0.7, transpose=turned, experts=experts)
    flat, operand = weight.reshape(-1, columns), {"a": a, "b": b}.__getitem__
    blocks = [
        apply(term, flat[at : at + step].clone(), start=at, operand=operand)
        for at in range(0, len(flat), step)
    ]
    assert near(torch.cat(blocks).view_as(weight), weight + deltas * 0.7)
    if not turned:
        alone = term.of_expert(2, len(a))
        part = apply(replace(alone, out_start=4), torch.zeros(3, columns), start=1, operand=operand)
        assert near(part, deltas[2, 5:8] * 0.7)
