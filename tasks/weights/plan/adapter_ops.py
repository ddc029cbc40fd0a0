"""Terms: the changes that an adapter makes to one base tensor, as plain data.

A term names adapter tensors as "<input>:<key>". `execute/kernels.py` computes terms in fp32 on
blocks of rows of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

Stride = tuple[int, int, int]
"""(start, stop, step), as in `range`."""


@dataclass(frozen=True)
class LowRank:
    """`W + scale * B @ A`, or its transpose: LoRA on a linear layer, an embedding, an expert.

    LoRA: https://arxiv.org/abs/2106.09685, rank-stabilised scale: https://arxiv.org/abs/2312.03732.

    Attributes:
        a: lora_A, shape (rank, in).
        b: lora_B, shape (out, rank).
        scale: factor of the product.
        transpose: add the product's transpose (embeddings, Conv1D).
        a_rows: the rows of A that belong to this expert; None for all.
        b_columns: the columns of B that belong to this expert; None for all.
        out_start: row of the (possibly transposed) product at which the output tensor begins, if
            it is one part of a fused tensor.
        experts: number of experts in a 3-D output (experts, rows, columns); 1 for a matrix. In
            peft's layout, expert `e` has the rows `e * rank ... (e + 1) * rank` of A and every
            `experts`-th column of B from `e` on.
    """

    kind: ClassVar[str] = "low_rank"
    a: str
    b: str
    scale: float
    transpose: bool = False
    a_rows: Stride | None = None
    b_columns: Stride | None = None
    out_start: int = 0
    experts: int = 1

    def of_expert(self, index: int, rows_of_a: int) -> LowRank:
        """Return the term of one expert's matrix.

        Args:
            index: number of the expert.
            rows_of_a: rows of the full A, all experts together.
        """
        rank = rows_of_a // self.experts
        return replace(
            self,
            a_rows=(index * rank, (index + 1) * rank, 1),
            b_columns=(index, rows_of_a, self.experts),
            experts=1,
        )


@dataclass(frozen=True)
class Dora:
    """`m * (W + scale * B @ A) / |W + scale * B @ A|`, with the norm of each output feature.

    DoRA: https://arxiv.org/abs/2402.09353. It is the only term of its tensor. Without `transpose` a
    feature is a row of the output. With `transpose` it is a column, whose norm needs every row (see
    `needs_all_rows`), and `out_start` is 0.

    Attributes:
        a: lora_A, shape (rank, in).
        b: lora_B, shape (out, rank).
        magnitude: `m`, shape (out,).
        scale: factor of the product.
        transpose: add the product's transpose (embeddings, Conv1D).
        out_start: row of the product at which the output tensor begins.
    """

    kind: ClassVar[str] = "dora"
    a: str
    b: str
    magnitude: str
    scale: float
    transpose: bool = False
    out_start: int = 0


@dataclass(frozen=True)
class Rows:
    """`W[indices[i]] = values[i]`: rows replaced by trained ones (trainable token indices)."""

    kind: ClassVar[str] = "rows"
    values: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Add:
    """`W + scale * value`, where `value` has the output's shape: the bias of a lora_B."""

    kind: ClassVar[str] = "add"
    value: str
    scale: float


Term = LowRank | Dora | Rows | Add
_KINDS: dict[str, type[Term]] = {
    term_class.kind: term_class for term_class in (LowRank, Dora, Rows, Add)
}


def needs_all_rows(term: Term) -> bool:
    """Return True if the term takes norms of columns: its block has to be the full tensor."""
    return isinstance(term, Dora) and term.transpose


def as_slice(stride: Stride | None) -> slice:
    """Return a stride as a slice; None for all."""
    return slice(None) if stride is None else slice(*stride)


def term_as_json(term: Term) -> dict[str, Any]:
    """Return plain JSON that includes the term's kind."""
    return {"kind": term.kind, **asdict(term)}


def term_from_json(raw: Mapping[str, Any]) -> Term:
    """Read the result of `term_as_json`."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k != "kind"}
    kind: Any = _KINDS[raw["kind"]]
    term: Term = kind(**fields)
    return term


def operands(term: Term) -> tuple[str, ...]:
    """Return the names of the adapter tensors that a term reads."""
    names = ("a", "b", "magnitude", "values", "value")
    return tuple(getattr(term, name) for name in names if hasattr(term, name))
