"""The plan of a gather, merge or convert: one operation per output tensor, as plain data.

    plan = Plan(ops, dropped, max_shard_bytes)
    validate(plan, sources)         every input byte once, or dropped for a reason
    write(plan, sources, out)       only computes; `write.py`

Planning decides everything, from headers alone: the bytes, shape and dtype of every output tensor,
and that every input tensor is used or dropped. After `validate` no key or dtype can fail during
execution; only disks can. Dtypes are safetensors names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Literal

from tasks.core.contract import describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.dtypes import ITEM_BITS, casts, is_float
from tasks.weights.files.reader import WEIGHTS, files_of
from tasks.weights.files.tensors import Sources, Tensor, Tensors, find
from tasks.weights.rounding import GRIDS

if TYPE_CHECKING:
    from tasks.weights.model import Model

Kind = Literal["copy", "cast", "compute"]
Shape = tuple[int, ...]

# Terms: changes of a tensor by an adapter. Operands are adapter tensors, "<input>:<key>".


@dataclass(frozen=True)
class LowRank:
    """`W + scale * B @ A`, or its transpose: LoRA on a linear layer, an embedding, an expert.

    LoRA: https://arxiv.org/abs/2106.09685, rank-stabilised scale: https://arxiv.org/abs/2312.03732.
    With `magnitude` DoRA, https://arxiv.org/abs/2402.09353: the sum is scaled to these norms of its
    rows. It is then the only term of its tensor, and not transposed.
    """

    a: str  # lora_A, shape (rank, in)
    b: str  # lora_B, shape (out, rank)
    scale: float
    transpose: bool = False  # add the product's transpose (embeddings, Conv1D)
    # Row of the (possibly transposed) product at which the output begins, if it is one part of a
    # fused tensor
    out_start: int = 0
    # Number of experts that A and B have factors of; 1 for a matrix. In peft's layout expert `e`
    # has the rows `e * rank ... (e + 1) * rank` of A and every `experts`-th column of B from `e` on
    experts: int = 1
    expert: int | None = None  # the only expert in the output; None for a stack of all
    magnitude: str = ""  # DoRA's norms, shape (out,)

    def factors(self, a: Any, b: Any, expert: int = 0) -> tuple[Any, Any]:
        """Return A and B of one expert, as arrays of numpy or torch."""
        expert = expert if self.expert is None else self.expert
        rank = len(a) // self.experts
        return a[expert * rank : (expert + 1) * rank], b[:, expert :: self.experts]


@dataclass(frozen=True)
class Rows:
    """`W[indices[i]] = values[i]`: rows replaced by trained ones (trainable token indices)."""

    values: str
    indices: tuple[int, ...]


Term = LowRank | Rows


def operands(term: Term) -> tuple[str, ...]:
    """Return the names of the adapter tensors that a term reads."""
    names = (term.values,) if isinstance(term, Rows) else (term.a, term.b, term.magnitude)
    return tuple(filter(None, names))


def is_dora(op: Op) -> bool:
    """Return True if the rows of the output are scaled to trained norms."""
    return any(isinstance(term, LowRank) and term.magnitude for term in op.terms)


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

    The output keeps the files of `source`, the input of most operations, if no dtype changes and
    none is too large: unchanged files are linked. `dtype` None keeps each tensor's; `wide` is
    `Model.wide`.
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


_SHOWN = 50
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def validate(plan: Plan, sources: Sources) -> None:
    """Check a plan against its inputs by the names that the plan uses, headers only.

    Raises:
        ContractError: lists every finding: input tensors that are missing, of another dtype, too
            short, used twice or unused; output names planned twice; casts between dtypes that
            cannot be cast; empty tensors.
    """
    if findings := list(plan_findings(plan, sources)):
        raise ContractError(
            f"plan does not fit its inputs: {first_and_more(findings)}", details=findings[:_SHOWN]
        )


def plan_findings(plan: Plan, sources: Sources) -> Iterator[str]:
    """Yield everything that is wrong with a plan, one line each."""
    counts = Counter(op.name for op in plan.ops)
    yield from (f"{name}: planned {n} times" for name, n in counts.items() if n > 1)
    if not plan.ops:
        yield "the plan has no operations"
    for op in plan.ops:
        yield from (f"{op.name}: {text}" for text in _op_findings(op, sources))
    # Every input tensor is used once and in full, or dropped for a reason.
    used: dict[str, list[tuple[int, int, str]]] = {}
    shared = {*plan.untied, *plan.copied}
    for op in sorted(plan.ops, key=lambda op: op.name in shared):
        if op.name in shared and op.source in used:
            continue  # a tied tensor, or one that was, is read for both of its names
        if op.encoding is None or op.encoding.part == "weight":  # scales have the same source
            used.setdefault(op.source, []).append((op.start, op.start + prod(op.shape), op.name))
    by_terms = {name for op in plan.ops for term in op.terms for name in operands(term)}
    for name in plan.dropped:
        if isinstance(find(name, sources), str):
            yield f"{name}: to be dropped, but it is in no input"
        elif name in used or name in by_terms:
            yield f"{name}: to be dropped, but also used"
    for input_name, source in sources.items():
        for key, info in source.items():
            name = f"{input_name}:{key}"
            if name in used:
                yield from _part_findings(name, info.numel, used[name])
            elif name not in by_terms and name not in plan.dropped:
                yield f"{name}: {describe(info.shape, info.dtype)} is used by nothing"


def _part_findings(name: str, size: int, parts: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    at, last = 0, ""
    for first, end, op in [*sorted(parts), (size, size, "")]:
        if first > at:
            yield f"{name}: elements {at} to {first} are used by nothing"
        elif first < at and op:
            yield f"{name}: is used by {last} and by {op}"
        at, last = max(at, end), op


def _op_findings(op: Op, sources: Sources) -> Iterator[str]:
    """Yield what is wrong with one operation; planners have compared the shapes of its terms."""
    for name in (name for term in op.terms for name in operands(term)):
        operand = find(name, sources)
        if isinstance(operand, str):
            yield operand
        elif not is_float(operand.dtype):
            yield f"{name}: {operand.dtype} is not a float dtype"
    tensor = find(op.source, sources)
    if isinstance(tensor, str):
        yield tensor
        return
    if op.dtype not in ITEM_BITS:
        yield f"unknown dtype {op.dtype}"
        return
    if op.transpose and len(op.shape) < 2:
        yield f"{list(op.shape)} cannot be transposed"
        return
    if not prod(op.shape):
        yield f"{describe(op.shape, op.dtype)} has no elements"
    if tensor.dtype != op.source_dtype:
        yield f"{op.source} is {tensor.dtype}, planned as {op.source_dtype}"
    else:
        yield from _extent_findings(op, tensor)
    cast = op.dtype != op.source_dtype and op.encoding is None
    if cast and not {op.dtype, op.source_dtype} <= _FLOATS:
        yield f"{op.source_dtype} cannot be cast to {op.dtype}"
    if op.terms and not is_float(op.dtype):
        yield f"{op.dtype} is not a float dtype, so nothing can be added to it"


def _extent_findings(op: Op, tensor: Tensor) -> Iterator[str]:
    size, wanted = tensor.numel, op.start + prod(op.read_shape)
    stored = describe(tensor.shape, tensor.dtype)
    if op.start < 0 or wanted > size:
        text = f"elements {op.start} to {wanted}" if op.start else describe(op.shape, op.dtype)
        yield f"needs {text}, {op.source} is {stored}"
    elif op.start == 0 and wanted == size:
        read = op.read_shape
        read = (*read[:-2], read[-1], read[-2]) if op.transpose else read
        # A leading axis may be split or merged.
        split = {len(read), len(tensor.shape)} == {2, 3} and read[-1] == tensor.shape[-1]
        if read != tuple(tensor.shape) and not split:
            yield f"must be {list(op.shape)}, {op.source} is {list(tensor.shape)}"
    # The files of a packed matrix hold 4 bits for an element, and scales.
    if op.packed is None and tensor.nbytes != size * ITEM_BITS[tensor.dtype] // 8:
        yield f"{op.source}: {stored}, but its files hold {tensor.nbytes} bytes"


# What was written.


@dataclass
class Written:
    """One written tensor; for the adapter's update D, the base W and the written tensor Q."""

    file: str  # output file that holds it
    checksum: str = ""  # BLAKE3 hash of its bytes
    copied: bool = False  # linked or copied by the kernel, without reading it
    nonfinite: int = 0  # number of NaN or infinite elements; also 0 if the values were not read
    all_zero: bool | None = None  # None if the values were not inspected
    # fraction of elements that the adapter changed; None if it has no terms for the tensor
    changed: float | None = None
    update: float = 0.0  # `<D, D>`
    kept: float = 0.0  # `<Q - W, D>`: `update` if all is kept
    nearest: float = 0.0  # the same for the sum rounded to nearest


@dataclass(frozen=True)
class Executed:
    """Result of executing a plan."""

    tensors: Mapping[str, Written]  # in the plan's order
    linked: Sequence[str] = ()  # output files that are an input's file, linked or copied as a whole
    written: int = 0  # bytes of tensor data that this process wrote; kernel copies do not count

    @property
    def hashes(self) -> dict[tuple[str, str], str]:
        """Hash of every output tensor's bytes, by file and tensor, for `artifact.publish`."""
        return {(each.file, name): each.checksum for name, each in self.tensors.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """Hash of every output tensor's bytes, by name."""
        return {name: each.checksum for name, each in self.tensors.items()}

    @property
    def changed(self) -> dict[str, Written]:
        """The tensors that the adapter changes, by name."""
        return {name: each for name, each in self.tensors.items() if each.changed is not None}

    def kept(self) -> tuple[float, float] | None:
        """Return the shares of the update that the output keeps, and that nearest would keep.

        None if nothing was changed, or elements are not finite, which fails checks of their own.
        """
        changed = self.changed.values()
        update = sum(each.update for each in changed)
        if not update or not isfinite(update):
            return None
        kept = sum(each.kept for each in changed) / update
        return (kept, sum(each.nearest for each in changed) / update) if isfinite(kept) else None
