"""The plan: one operation per output tensor, made and checked from headers alone.

    plan = Plan(ops, dropped, limit)
    plan.as_json()                      goes into the manifest
    execute(plan, sources, out)         only computes (`execute/execute.py`)

Planning decides everything: the bytes, shape and dtype of every output tensor, and that every input
tensor is used or dropped for a reason. A plan is plain data that can be compared, stored and sent
to the process that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

from tasks.weights.files.header import ITEM_BITS
from tasks.weights.plan.adapter_ops import Term, term_as_json, term_from_json
from tasks.weights.rounding import GRIDS

Kind = Literal["copy", "cast", "compute"]
STORED = "stored"
"""Key of `Op.quantization` under which a plan describes how the source is packed."""


@dataclass(frozen=True)
class Encoding:
    """Storage of a matrix in 8 bits, as two output tensors; see `quantized/quantize.py`.

    Attributes:
        scheme: "w8a8" or "fp8".
        part: "weight" for the 8-bit matrix, "scale" for the scale of every row, (rows, 1).
        columns: columns of the matrix.
        held: safetensors name of the dtype in which a loader may hold the scales.
    """

    scheme: str
    part: Literal["weight", "scale"]
    columns: int
    held: str = "BF16"


@dataclass(frozen=True)
class Op:
    """Operation that makes one output tensor: read, dequantise, add terms in fp32, round once.

    Attributes:
        name: key of the output tensor.
        shape: shape of the output tensor.
        dtype: dtype of the output tensor, safetensors name.
        source: input tensor "<input>:<key>", for example "base:lm_head.weight"; a key may contain
            colons, the name of an input may not.
        source_dtype: dtype of the source, safetensors name.
        start: first element in the flattened source, if the output is one contiguous part of a
            fused tensor.
        transpose: swap the last two axes of the source.
        quantization: settings to quantise the source to 4 bits and back, as training did, or to
            decode a source stored in 4 bits; as in train.json. None for neither.
        terms: changes in fp32, in order.
        encoding: storage of the result in 8 bits; None for none.
        unbiased: round what the adapter changes without bias (`rounding.py`), not to nearest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    source_dtype: str
    start: int = 0
    transpose: bool = False
    quantization: Mapping[str, Any] | None = None
    terms: tuple[Term, ...] = ()
    encoding: Encoding | None = None
    unbiased: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the output in bytes."""
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape that is computed: the output's, or the full matrix's if the output is a scale."""
        if self.encoding is None:
            return self.shape
        return (*self.shape[:-1], self.encoding.columns)

    @property
    def kind(self) -> Kind:
        """Kind: "copy" moves bytes, "cast" changes only the dtype, "compute" is all else."""
        if self.terms or self.transpose or self.encoding or self.quantization is not None:
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
    """All operations of a gather, merge or convert, and the input tensors that are left out.

    Attributes:
        ops: operations, in the order in which files are filled.
        dropped: input tensors that the output leaves out.
        max_shard_bytes: limit of the tensor data in one output file; None writes a single file.
        notes: facts about the output for its readers, as plain JSON.
        shards: number of operations per file, to keep the files of an input; `max_shard_bytes` is
            then ignored. None fills files up to the limit.
    """

    ops: tuple[Op, ...]
    dropped: tuple[Dropped, ...] = ()
    max_shard_bytes: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Size of all output tensors in bytes."""
        return sum(op.nbytes for op in self.ops)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON, for a manifest or another process."""
        ops = [{**asdict(op), "terms": list(map(term_as_json, op.terms))} for op in self.ops]
        return {
            "ops": ops,
            "dropped": [asdict(entry) for entry in self.dropped],
            "max_shard_bytes": self.max_shard_bytes,
            "notes": dict(self.notes),
            "shards": None if self.shards is None else list(self.shards),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Plan:
        """Read the result of `as_json`, also after a round trip through JSON."""
        ops = tuple(
            Op(
                **{
                    **op,
                    "shape": tuple(op["shape"]),
                    "terms": tuple(term_from_json(term) for term in op["terms"]),
                    "encoding": Encoding(**op["encoding"]) if op.get("encoding") else None,
                }
            )
            for op in raw["ops"]
        )
        dropped = tuple(Dropped(**entry) for entry in raw["dropped"])
        shards = raw.get("shards")
        return cls(
            ops,
            dropped,
            raw["max_shard_bytes"],
            dict(raw["notes"]),
            None if shards is None else tuple(shards),
        )
