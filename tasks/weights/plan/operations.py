"""The plan: one operation an output tensor, made and checked from headers alone.

    plan = Plan(ops, dropped, limit)
    plan.as_json()                      goes into the manifest
    execute(plan, sources, out)         only computes (`execute.py`)

Planning decides and validates everything: which bytes become which tensor, shapes, ranks, that
every input tensor is used or dropped for a reason. A plan is plain data: it compares, it
serialises, and it travels to the process that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

from tasks.weights.files.header import ITEM_BITS
from tasks.weights.plan.adapter_ops import Term, term_as_json, term_from_json

Kind = Literal["copy", "cast", "compute"]


@dataclass(frozen=True)
class Encoding:
    """The output tensor is one half of a matrix in 8 bits; see `encode.py`.

    Attributes:
        scheme: "w8a8" or "fp8".
        part: its numbers, of the matrix's shape, or the scale of every row, (rows, 1).
        columns: of the matrix.
        held: safetensors name of the dtype in which a loader may hold the scales.
    """

    scheme: str
    part: Literal["weight", "scale"]
    columns: int
    held: str = "BF16"


@dataclass(frozen=True)
class Op:
    """How one output tensor comes to be: read, dequantise, add terms in fp32, round once.

    Attributes:
        name: key of the output tensor.
        shape: of the output tensor.
        dtype: of the output tensor, safetensors name.
        source: where it starts from, "<input>:<key>", e.g. "base:lm_head.weight"; keys may contain
            colons, names of inputs do not.
        source_dtype: of the source, safetensors name.
        start: element of the flattened source at which it begins: a tensor that is one part of a
            fused one. The part is contiguous.
        transpose: the source's last two axes are swapped with respect to the output's.
        quantization: take the tensor through 4 bits first, as training did, or decode it when it is
            stored in 4 bits; as in train.json. None for neither.
        terms: what is added to it or done to it, in order, in fp32.
        encoding: how the result is stored in 8 bits; None where it is not.
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

    @property
    def nbytes(self) -> int:
        """Size of the output in bytes."""
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape of what is computed: the output's, or the matrix's whose scales the output is."""
        if self.encoding is None:
            return self.shape
        return (*self.shape[:-1], self.encoding.columns)

    @property
    def kind(self) -> Kind:
        """ "copy" moves bytes, "cast" changes the dtype only, "compute" is everything else."""
        if self.terms or self.transpose or self.encoding or self.quantization is not None:
            return "compute"
        return "copy" if self.dtype == self.source_dtype else "cast"

    @property
    def input(self) -> str:
        """Name of the input that `source` lies in."""
        return self.source.partition(":")[0]

    @property
    def key(self) -> str:
        """Key of the source tensor in its input."""
        return self.source.partition(":")[2]


@dataclass(frozen=True)
class Dropped:
    """An input tensor ("<input>:<key>") that goes nowhere, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """All operations in the order in which shards are filled, and what is left out.

    `max_shard_bytes` bounds the tensor data of one output file; None writes a single file. Where
    `shards` is given it says how many operations fill each file, and nothing is bounded: an input's
    own shards, which are then copied or linked as they are.
    """

    ops: tuple[Op, ...]
    dropped: tuple[Dropped, ...] = ()
    max_shard_bytes: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the output's tensors together."""
        return sum(op.nbytes for op in self.ops)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, for a manifest or another process."""
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
        """What `as_json` made, or what JSON made of that."""
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
