"""The plan of a gather, merge or convert: one operation per output tensor, as plain data.

    plan = Plan(ops, dropped, max_shard_bytes)
    validate(plan, sources)         every input byte once, or dropped for a reason; `validate.py`
    execute(plan, sources, out)     only computes; `execute/execute.py`

Planning decides everything, from headers alone: the bytes, shape and dtype of every output tensor,
and that every input tensor is used or dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, Literal

from tasks.weights.files.dtypes import ITEM_BITS, is_float
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.tensors import Tensors
from tasks.weights.rounding import GRIDS

Kind = Literal["copy", "cast", "compute"]
Shape = tuple[int, ...]
Stride = tuple[int, int, int]
"""(start, stop, step), as in `range`."""

# Terms: changes of a tensor by an adapter. Operands are adapter tensors, "<input>:<key>".


@dataclass(frozen=True)
class LowRank:
    """`W + scale * B @ A`, or its transpose: LoRA on a linear layer, an embedding, an expert.

    LoRA: https://arxiv.org/abs/2106.09685, rank-stabilised scale: https://arxiv.org/abs/2312.03732.
    """

    a: str  # lora_A, shape (rank, in)
    b: str  # lora_B, shape (out, rank)
    scale: float  # factor of the product
    transpose: bool = False  # add the product's transpose (embeddings, Conv1D)
    a_rows: Stride | None = None  # the rows of A that belong to this expert; None for all
    b_columns: Stride | None = None  # the columns of B that belong to this expert; None for all
    # Row of the (possibly transposed) product at which the output tensor begins, if it is
    # one part of a fused tensor
    out_start: int = 0
    # Number of experts in a 3-D output (experts, rows, columns); 1 for a matrix. In peft's
    # layout, expert `e` has the rows `e * rank ... (e + 1) * rank` of A and every
    # `experts`-th column of B from `e` on
    experts: int = 1

    def of_expert(self, index: int, rows_of_a: int) -> LowRank:
        """Return the term of one expert's matrix; `rows_of_a` counts all experts together."""
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
    `needs_all_rows`), and `out_start` is 0. `magnitude` is `m`, shape (out,); other operands are
    those of `LowRank`.
    """

    a: str
    b: str
    magnitude: str
    scale: float
    transpose: bool = False
    out_start: int = 0


@dataclass(frozen=True)
class Rows:
    """`W[indices[i]] = values[i]`: rows replaced by trained ones (trainable token indices)."""

    values: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Add:
    """`W + scale * value`, where `value` has the output's shape: the bias of a lora_B."""

    value: str
    scale: float


Term = LowRank | Dora | Rows | Add


def needs_all_rows(term: Term) -> bool:
    """Return True if the term takes norms of columns: its block has to be the full tensor."""
    return isinstance(term, Dora) and term.transpose


def as_slice(stride: Stride | None) -> slice:
    """Return a stride as a slice; None for all."""
    return slice(None) if stride is None else slice(*stride)


def operands(term: Term) -> tuple[str, ...]:
    """Return the names of the adapter tensors that a term reads."""
    names = ("a", "b", "magnitude", "values", "value")
    return tuple(getattr(term, name) for name in names if hasattr(term, name))


@dataclass(frozen=True)
class Encoding:
    """Storage of a matrix in 8 bits, as two output tensors; see `quantized/quantize.py`."""

    scheme: str  # "w8a8" or "fp8"
    # "weight" for the 8-bit matrix, "scale" for the scale of every row, (rows, 1)
    part: Literal["weight", "scale"]
    columns: int  # columns of the matrix
    held: str = "BF16"  # safetensors name of the dtype in which a loader may hold the scales


@dataclass(frozen=True)
class Op:
    """Operation that makes one output tensor: read, dequantise, add terms in fp32, round once.

    Dtypes are safetensors names.
    """

    name: str  # key of the output tensor
    shape: Shape  # shape of the output tensor
    dtype: str  # dtype of the output tensor
    # Input tensor "<input>:<key>", for example "base:lm_head.weight"; a key may contain
    # colons, the name of an input may not
    source: str
    source_dtype: str  # dtype of the source
    # First element in the flattened source, if the output is one contiguous part of a fused
    # tensor
    start: int = 0
    transpose: bool = False  # swap the last two axes of the source
    # Settings of training, as in train.json, to quantise the source to 4 bits and back;
    # None for none
    quantization: Mapping[str, Any] | None = None
    # Format of a source that is stored in 4 bits, to decode it; None for none
    packed: Mapping[str, Any] | None = None
    terms: tuple[Term, ...] = ()  # changes in fp32, in order
    encoding: Encoding | None = None  # storage of the result in 8 bits; None for none
    # Round what the adapter changes without bias (`rounding.py`), not to nearest
    unbiased: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the output in bytes."""
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8

    @property
    def read_shape(self) -> Shape:
        """Shape that is computed: the output's, or the full matrix's if the output is a scale."""
        if self.encoding is None:
            return self.shape
        return (*self.shape[:-1], self.encoding.columns)

    @property
    def is_decoded(self) -> bool:
        """True if the source is stored in 4 bits, or is to be quantised as in training."""
        return self.quantization is not None or self.packed is not None

    @property
    def kind(self) -> Kind:
        """Kind: "copy" moves bytes, "cast" changes only the dtype, "compute" is all else."""
        if self.terms or self.transpose or self.encoding or self.is_decoded:
            return "compute"
        if self.dtype == self.source_dtype:
            return "copy"
        return "compute" if self.unbiased and self.dtype in GRIDS else "cast"

    @property
    def input(self) -> str:
        """Name of the input that holds the source."""
        return self.source.partition(":")[0]

    @property
    def key(self) -> str:
        """Key of the source tensor in its input."""
        return self.source.partition(":")[2]


@dataclass(frozen=True)
class Dropped:
    """An input tensor ("<input>:<key>") that the output leaves out, and the reason."""

    source: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """All operations of a gather, merge or convert, and the input tensors that are left out."""

    ops: tuple[Op, ...]  # operations, in the order in which files are filled
    dropped: tuple[Dropped, ...] = ()  # input tensors that the output leaves out
    # Limit of the tensor data in one output file; None writes a single file
    max_shard_bytes: int | None = None
    # Number of operations per file, to keep the files of an input; `max_shard_bytes` is
    # then ignored. None fills files up to the limit
    shards: tuple[int, ...] | None = None
    # Keys that were tied in the base and are stored separately from now on
    untied: tuple[str, ...] = ()
    # Keys that store a replaced tensor a second time, since they stay tied
    copied: tuple[str, ...] = ()
    rows: int | None = None  # rows of the embeddings if the vocabulary grew; None if it did not

    @property
    def nbytes(self) -> int:
        """Size of all output tensors in bytes."""
        return sum(op.nbytes for op in self.ops)


ROWS = 16
"""Minimum number of rows in a block; block sizes are multiples of it."""
ELEMENTS = 1 << 18
"""Target number of elements in a block: 1 MB in fp32, so it stays in the cache until hashed."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as (rows, columns): leading axes are flattened, a vector is one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1, 1)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def row_blocks(rows: int, columns: int, elements: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of every block of rows; a small remainder joins the last block.

    Args:
        elements: target number of elements in a block; None for `ELEMENTS`. It must depend on
            shapes alone, so that results do not depend on the machine.
    """
    target = ELEMENTS if elements is None else elements
    step = max(ROWS, target // max(1, columns) // ROWS * ROWS)
    first = 0
    while first < rows:
        end = first + step
        if rows - end < ROWS:
            end = rows
        yield first, end
        first = end


def as_is(source: Tensors, name: str = WEIGHTS) -> Plan:
    """Return the plan that copies every tensor of a source, which the plan calls `name`."""
    return Plan(
        tuple(
            Op(key, tuple(info.shape), info.dtype, f"{name}:{key}", info.dtype)
            for key, info in source.items()
        )
    )


def with_output(
    plan: Plan, *, dtype: str | None, max_shard_bytes: int, files: Mapping[str, str]
) -> Plan:
    """Return the same plan with another dtype for floats and another size of files.

    The output keeps the files of the input if no dtype changes and none of them is too large, so
    that unchanged files can be linked.

    Args:
        plan: operations in the order of the input's files.
        dtype: safetensors name for all float tensors; None keeps the dtype of each tensor.
        max_shard_bytes: limit of the tensor data in one file.
        files: name of the input file by source key.
    """
    ops = tuple(
        replace(op, dtype=dtype) if dtype is not None and is_float(op.dtype) else op
        for op in plan.ops
    )
    groups = [(file, list(of)) for file, of in groupby(ops, lambda op: files.get(op.key, ""))]
    same = (
        len({file for file, _ in groups}) == len(groups)
        and all(op.dtype == op.source_dtype for op in ops)
        and all(sum(op.nbytes for op in of) <= max_shard_bytes for _, of in groups)
    )
    shards = tuple(len(of) for _, of in groups) if same else None
    return replace(plan, ops=ops, max_shard_bytes=max_shard_bytes, shards=shards)
