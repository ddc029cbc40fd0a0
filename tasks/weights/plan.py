"""The plan of a gather, merge or convert: one operation per output tensor, as plain data.

    plan = Plan(ops, dropped, max_shard_bytes)
    validate(plan, sources)         every input byte once, or dropped for a reason; `validate.py`
    write(plan, sources, out)       only computes; `write.py`

Planning decides everything, from headers alone: the bytes, shape and dtype of every output tensor,
and that every input tensor is used or dropped. Dtypes are safetensors names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from tasks.weights.files.dtypes import ITEM_BITS, casts, is_float
from tasks.weights.files.reader import WEIGHTS, files_of
from tasks.weights.files.tensors import Sources, Tensor, Tensors
from tasks.weights.rounding import GRIDS

if TYPE_CHECKING:
    from tasks.weights.model import Model

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
    scale: float
    transpose: bool = False  # add the product's transpose (embeddings, Conv1D)
    a_rows: Stride | None = None  # the rows of A that belong to this expert; None for all
    b_columns: Stride | None = None  # the columns of B that belong to this expert; None for all
    # Row of the (possibly transposed) product at which the output begins, if it is one part of a
    # fused tensor
    out_start: int = 0
    # Number of experts in a 3-D output (experts, rows, columns); 1 for a matrix. In peft's layout
    # expert `e` has the rows `e * rank ... (e + 1) * rank` of A and every `experts`-th column of B
    # from `e` on
    experts: int = 1

    def of_expert(self, index: int, rows_of_a: int) -> LowRank:
        """Return the term of one expert's matrix; `rows_of_a` counts all experts together."""
        rank = rows_of_a // self.experts
        a_rows, b_columns = (index * rank, (index + 1) * rank, 1), (index, rows_of_a, self.experts)
        return replace(self, a_rows=a_rows, b_columns=b_columns, experts=1)


@dataclass(frozen=True)
class Dora:
    """`m * (W + scale * B @ A) / |W + scale * B @ A|`, with the norm of each output feature.

    DoRA: https://arxiv.org/abs/2402.09353. It is the only term of its tensor. Without `transpose` a
    feature is a row of the output. With `transpose` it is a column, whose norm needs every row, and
    `out_start` is 0. `magnitude` is `m`, shape (out,); other operands are those of `LowRank`.
    """

    a: str
    b: str
    magnitude: str
    scale: float
    transpose: bool = False
    out_start: int = 0

    @property
    def pair(self) -> LowRank:
        """The product that is added before the norm."""
        return LowRank(self.a, self.b, self.scale, self.transpose, out_start=self.out_start)


@dataclass(frozen=True)
class Rows:
    """`W[indices[i]] = values[i]`: rows replaced by trained ones (trainable token indices)."""

    values: str
    indices: tuple[int, ...]


Term = LowRank | Dora | Rows
OPERANDS = ("a", "b", "magnitude", "values")
"""Fields of terms that name adapter tensors."""


def needs_all_rows(term: Term) -> bool:
    """Return True if the term takes norms of columns: its block has to be the full tensor."""
    return isinstance(term, Dora) and term.transpose


def as_slice(stride: Stride | None) -> slice:
    """Return a stride as a slice; None for all."""
    return slice(None) if stride is None else slice(*stride)


def operands(term: Term) -> tuple[str, ...]:
    """Return the names of the adapter tensors that a term reads."""
    return tuple(getattr(term, name) for name in OPERANDS if hasattr(term, name))


@dataclass(frozen=True)
class Encoding:
    """Storage of a matrix in 8 bits, as two output tensors; see `quantized/quantize.py`."""

    scheme: str  # "w8a8" or "fp8"
    # "weight" for the 8-bit matrix, "scale" for the scale of every row, (rows, 1)
    part: Literal["weight", "scale"]
    columns: int  # columns of the matrix
    scale_dtype: str = "BF16"  # dtype in which a loader may hold the scales


@dataclass(frozen=True)
class Op:
    """Operation that makes one output tensor: read, dequantise, add terms in fp32, round once."""

    name: str  # key of the output tensor
    shape: Shape
    dtype: str
    # Input tensor "<input>:<key>", for example "base:lm_head.weight"; a key may contain colons, the
    # name of an input may not
    source: str
    source_dtype: str
    # First element in the flattened source, if the output is one part of a fused tensor
    start: int = 0
    transpose: bool = False  # swap the last two axes of the source
    # Settings of training, as in train.json, to quantise the source to 4 bits and back
    quantization: Mapping[str, Any] | None = None
    # Format of a source that is stored in 4 bits or fp8, to decode it
    packed: Mapping[str, Any] | None = None
    terms: tuple[Term, ...] = ()  # changes in fp32, in order
    encoding: Encoding | None = None  # storage of the result in 8 bits
    # Round what the adapter changes without bias (`rounding.py`), not to nearest
    unbiased: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the output in bytes."""
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8

    @property
    def read_shape(self) -> Shape:
        """Shape that is computed: the output's, or the full matrix's if the output is a scale."""
        return self.shape if self.encoding is None else (*self.shape[:-1], self.encoding.columns)

    @property
    def is_decoded(self) -> bool:
        """True if the source is stored in 4 bits, or is to be quantised as in training."""
        return self.quantization is not None or self.packed is not None

    @property
    def kind(self) -> Kind:
        """Kind: "copy" moves bytes, "cast" only rounds them to nearest, "compute" is all else."""
        if self.terms or self.transpose or self.encoding or self.is_decoded:
            return "compute"
        if self.dtype == self.source_dtype:
            return "copy"
        plain = casts(self.source_dtype, self.dtype)
        return "cast" if plain and not (self.unbiased and self.dtype in GRIDS) else "compute"

    @property
    def input(self) -> str:
        """Name of the input that holds the source."""
        return self.source.partition(":")[0]

    @property
    def key(self) -> str:
        """Key of the source tensor in its input."""
        return self.source.partition(":")[2]


def plain_op(name: str, source: str, tensor: Tensor) -> Op:
    """Return the operation that writes the tensor "<input>:<key>" as it is, as `name`."""
    return Op(name, tuple(tensor.shape), tensor.dtype, source, tensor.dtype, packed=tensor.packed)


@dataclass(frozen=True)
class Plan:
    """All operations of a gather, merge or convert, and the input tensors that are left out."""

    ops: tuple[Op, ...]  # in the order in which files are filled
    dropped: Mapping[str, str] = field(default_factory=dict)  # "<input>:<key>" -> reason
    max_shard_bytes: int | None = None  # limit of tensor data in a file; None writes a single file
    # Number of operations per file, to keep the files of an input, instead of `max_shard_bytes`
    shards: tuple[int, ...] | None = None
    # Keys that were tied in the base and are stored separately from now on
    untied: tuple[str, ...] = ()
    # Keys that store a replaced tensor a second time, since they stay tied
    copied: tuple[str, ...] = ()
    rows: int | None = None  # rows of the embeddings if the vocabulary grew

    @property
    def nbytes(self) -> int:
        """Size of all output tensors in bytes."""
        return sum(op.nbytes for op in self.ops)


@dataclass(frozen=True)
class Planned:
    """A plan, its inputs by name, and what it makes: config.json and facts of the model."""

    plan: Plan
    sources: Sources
    config: Mapping[str, Any]
    facts: Model

    @property
    def tied(self) -> dict[str, str]:
        """Keys that the output may hold or not -> keys that hold the same tensor."""
        return {k: to for k, to in self.facts.tied.items() if k not in self.plan.untied}


ROWS = 16
"""Minimum number of rows in a block; block sizes are multiples of it."""
ELEMENTS = 1 << 18
"""Target number of elements in a block: 1 MB in fp32, so it stays in the cache until hashed."""


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return a shape as (rows, columns): leading axes are flattened, a vector is one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1, 1)
    return prod(shape[:-1]), shape[-1]


def row_blocks(rows: int, columns: int, elements: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of every block of rows; a small remainder joins the last block.

    `elements` is the target number of elements in a block, by default `ELEMENTS`. It must depend on
    shapes alone, so that results do not depend on the machine.
    """
    target = ELEMENTS if elements is None else elements
    step = max(ROWS, target // max(1, columns) // ROWS * ROWS)
    first = 0
    while first < rows:
        end = first + step if rows - first - step >= ROWS else rows
        yield first, end
        first = end


def as_is(source: Tensors, name: str = WEIGHTS) -> Plan:
    """Return the plan that copies every tensor of a source, which the plan calls `name`."""
    return Plan(tuple(plain_op(k, f"{name}:{k}", info) for k, info in source.items()))


def with_output(
    plan: Plan,
    source: Tensors,
    *,
    dtype: str | None,
    max_shard_bytes: int,
    wide: Collection[str] = (),
) -> Plan:
    """Return the same plan with another dtype for floats and another size of files.

    The output keeps the files of the input if no dtype changes and none of them is too large, so
    that unchanged files can be linked.

    Args:
        plan: operations in the order of the input's files.
        source: the input of most operations.
        dtype: dtype of all float tensors; None keeps the dtype of each tensor.
        max_shard_bytes: limit of the tensor data in one file.
        wide: `Model.wide`.
    """
    files = files_of(source)
    if dtype is not None:
        plan = cast_floats(plan, dtype, wide)
    groups = [(file, list(of)) for file, of in groupby(plan.ops, lambda op: files.get(op.key, ""))]
    same = (
        len({file for file, _ in groups}) == len(groups)
        and all(op.dtype == op.source_dtype for op in plan.ops)
        and all(sum(op.nbytes for op in of) <= max_shard_bytes for _, of in groups)
    )
    shards = tuple(len(of) for _, of in groups) if same else None
    return replace(plan, max_shard_bytes=max_shard_bytes, shards=shards)


def cast_floats(plan: Plan, dtype: str, wide: Collection[str] = ()) -> Plan:
    """Return the same plan with another dtype for all float tensors; those of `wide` get F32."""
    ops = (
        replace(op, dtype="F32" if op.name in wide else dtype) if is_float(op.dtype) else op
        for op in plan.ops
    )
    return replace(plan, ops=tuple(ops))
