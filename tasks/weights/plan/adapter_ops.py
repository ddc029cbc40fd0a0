"""Terms: what an adapter does to one base tensor, as plain data.

A term names adapter tensors as "<input>:<key>". `kernels.py` computes them, in fp32, on blocks of
rows of the output, so none of them may need more of the output than a block of whole rows.
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
        a: lora_A, shape (rank, in). b: lora_B, shape (out, rank).
        scale: factor of the product.
        transpose: add the product's transpose: embeddings, Conv1D.
        a_rows: the rows of A that belong to this expert; None for all.
        b_columns: the columns of B that belong to it.
        out_start: row of the (transposed, if asked) product at which the output tensor begins: one
            part of a fused tensor.
        experts: how many experts a 3-D output (experts, rows, columns) stacks. As peft lays it out,
            rows `e * rank ... (e + 1) * rank` of A and every `experts`-th column of B from `e` on
            belong to expert `e`. 1 for a matrix. `of_expert` gives the term of one expert alone.
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
        """The change to expert `index` alone, a matrix; `rows_of_a`: first axis of the whole A."""
        rank = rows_of_a // self.experts
        return replace(
            self,
            a_rows=(index * rank, (index + 1) * rank, 1),
            b_columns=(index, rows_of_a, self.experts),
            experts=1,
        )


@dataclass(frozen=True)
class Dora:
    """`m * (W + scale * B @ A) / |W + scale * B @ A|`, norms taken over each output feature.

    DoRA: https://arxiv.org/abs/2402.09353. Attributes as of `LowRank`; `magnitude`: shape (out,).
    Without `transpose` a feature is a row of the output; with it, a column, whose norm needs every
    row: see `kernels.needs_all_rows`, and `out_start` is 0. It is the only term of its tensor.
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
    """Rows replaced by trained ones: `W[indices[i]] = values[i]` (trainable token indices)."""

    kind: ClassVar[str] = "rows"
    values: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Add:
    """`W + scale * value`, of the output's shape: the bias of a lora_B."""

    kind: ClassVar[str] = "add"
    value: str
    scale: float


Term = LowRank | Dora | Rows | Add
_KINDS: dict[str, type[Term]] = {one.kind: one for one in (LowRank, Dora, Rows, Add)}


def term_as_json(term: Term) -> dict[str, Any]:
    """Plain JSON with the term's kind."""
    return {"kind": term.kind, **asdict(term)}


def term_from_json(raw: Mapping[str, Any]) -> Term:
    """What `term_as_json` made."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k != "kind"}
    kind: Any = _KINDS[raw["kind"]]
    term: Term = kind(**fields)
    return term


def operands(term: Term) -> tuple[str, ...]:
    """The adapter tensors that a term reads."""
    names = ("a", "b", "magnitude", "values", "value")
    return tuple(getattr(term, name) for name in names if hasattr(term, name))
