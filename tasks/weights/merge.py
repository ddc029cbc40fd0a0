"""Plan a merge of adapters into a base: one operation per tensor on disk.

    plan = plan_merge(base.tensors, model, changes(adapters, model), operands)

Keys, shapes and order of the output are those of the base checkpoint. `Slot`s carry the changes of
tensors in memory to the tensors on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tasks.core.contract import TensorLike, describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.dtypes import is_float
from tasks.weights.lora import Changes
from tasks.weights.mapping import Slot
from tasks.weights.model import CONV1D, Model
from tasks.weights.plan import Add, Dora, Dropped, LowRank, Op, Plan, Shape, Term, operands
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.vocabulary import resized_config

_SHOWN = 100


@dataclass(frozen=True)
class MergeSettings:
    """Settings of a merge."""

    dtype: str | None = None  # safetensors name for all floats; None keeps the dtype of each tensor
    # 4-bit settings of training, as in `Op.quantization`, for the tensors that training
    # stored in 4 bits. With "base": "dequantized" they also apply to tensors that no
    # adapter changes. None if training used no quantization
    quantization: Mapping[str, Any] | None = None
    quantized: frozenset[str] = frozenset()  # keys of the tensors that training stored in 4 bits
    # Limit of tensor data in one output file; None writes a single file
    max_shard_bytes: int | None = None
    base: str = "base"  # name of the base among the inputs of the plan
    rounding: Rounding = "unbiased"  # rounding of what the adapters change; see `rounding.py`


_AS_IT_IS = MergeSettings()


def plan_merge(
    base: Mapping[str, TensorLike],
    model: Model,
    changes: Changes,
    adapters: Mapping[str, TensorLike],
    settings: MergeSettings = _AS_IT_IS,
) -> Plan:
    """Plan a merge from headers alone."""
    merging = _Merging(base, model, changes, adapters, settings)
    # Changes with findings must not be used: their own findings are reported instead.
    ops = [] if changes.findings else list(merging.ops())
    findings = [*model.findings, *changes.findings, *merging.findings]
    if findings:
        raise ContractError(
            f"merge: adapter and base do not fit: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    used = {op.source for op in ops}
    replaced = [
        Dropped(source, f"replaced by {by}")
        for source, by in merging.replaced.items()
        if source not in used
    ]
    return Plan(
        tuple(ops),
        (*changes.dropped, *replaced),
        settings.max_shard_bytes,
        untied=tuple(model.aliases[alias] for alias in changes.unties),
        copied=tuple(merging.copied),
        rows=max((shape[0] for shape in changes.shapes.values()), default=None),
    )


def merged_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return config.json of the base, with the vocabulary size and ties of the merged model."""
    merged = dict(config) if plan.rows is None else resized_config(config, plan.rows)
    return {**merged, "tie_word_embeddings": False} if plan.untied else merged


class _Merging:
    """The operations of a merge, and what they found on the way.

    Attributes:
        findings: everything that is wrong.
        replaced: source in the base -> source in an adapter that replaces it.
        copied: keys that store a replaced tensor a second time, since they stay tied.
    """

    def __init__(
        self,
        base: Mapping[str, TensorLike],
        model: Model,
        changes: Changes,
        adapters: Mapping[str, TensorLike],
        settings: MergeSettings,
    ) -> None:
        self.base, self.model, self.adapters, self.settings = base, model, adapters, settings
        self.changes = changes
        self.changed = {*changes.terms, *changes.replacements}
        self.used: set[str] = set()
        self.findings: list[str] = []
        self.replaced: dict[str, str] = {}
        self.copied: list[str] = []

    def ops(self) -> Iterator[Op]:
        """Yield an operation for each tensor of the base, then those for untied tensors."""
        slots: dict[str, list[Slot]] = defaultdict(list)
        for slot in self.model.slots:
            slots[slot.key].append(slot)
        for key, info in self.base.items():
            of_key = slots.pop(key, [])
            if any(slot.shape != tuple(info.shape) for slot in of_key):
                self.findings.append(f"{key}: is {list(info.shape)}, the model's facts differ")
                continue
            yield self._rounded(self._op(key, of_key))
        self.findings += [f"{key}: not in the base" for key in slots]
        yield from map(self._rounded, self._stored_apart())
        if not self.model.findings:  # these findings would only repeat them
            self.findings += [
                f"{name}: changed by the adapter, but no tensor of the base contains it"
                for name in sorted(self.changed - self.used)
            ]

    def _rounded(self, op: Op) -> Op:
        """Round what an adapter changes or replaces as the settings say."""
        changed = bool(op.terms) or op.input != self.settings.base
        return replace(op, unbiased=changed and self.settings.rounding == "unbiased")

    def _op(self, key: str, slots: Sequence[Slot]) -> Op:
        if len(slots) == 1 and slots[0].whole:
            return self._changed(key, key, slots[0])
        for slot in slots:
            name = self._name(slot.live)
            if name in self.changed:
                self.used.add(name)
                self.findings.append(
                    f"{slot.live}: changed by the adapter; stored fused with others in {key}, "
                    "which this merge cannot split: merge it with peft's merge_and_unload"
                )
        op = self._by_key(self._plain(key, key))
        quantization = self._quantization(op, slots[0]) if slots else None
        if quantization is not None and quantization.get("base") == "dequantized":
            self.findings.append(f"{key}: fuses layers that training quantised one by one")
        return op

    def _stored_apart(self) -> Iterator[Op]:
        """Yield the operations of untied tensors that have no key in the base yet."""
        stored = {slot.live: slot for slot in self.model.slots}
        for alias in self.changes.unties:
            key, holder = self.model.aliases[alias], stored.get(self.model.ties[alias])
            if alias not in stored and holder is not None:
                slot = Slot(key, holder.shape, alias, holder.live_shape, transpose=holder.transpose)
                yield self._changed(key, holder.key, slot)

    def _changed(self, name: str, key: str, slot: Slot) -> Op:
        """Return the operation that writes base tensor `key`, changed at `slot`, as `name`."""
        live = self._name(slot.live)
        if live != slot.live and live in self.changes.replacements:
            self.copied.append(name)
        op = self._by_key(self._with(self._plain(name, key), slot, live))
        return replace(op, quantization=self._quantization(op, slot))

    def _name(self, live: str) -> str:
        """Return the name under which `Changes` lists a live tensor."""
        return live if live in self.changes.unties else self.model.ties.get(live, live)

    def _plain(self, name: str, key: str) -> Op:
        """Return the operation that writes base tensor `key` unchanged, in the output dtype."""
        info, settings = self.base[key], self.settings
        dtype = settings.dtype if settings.dtype and is_float(info.dtype) else info.dtype
        return Op(name, tuple(info.shape), dtype, f"{settings.base}:{key}", info.dtype)

    def _by_key(self, op: Op) -> Op:
        """Add the changes that name a part of a live tensor by its key on disk."""
        key = op.name
        if key not in self.changed or key in self.model.parameters:
            return op
        after = self._with(op, Slot(key, op.shape, key, op.shape), key)
        own = after.terms[len(op.terms) :]
        changed_twice = op.terms or op.input != self.settings.base
        if changed_twice and (
            after.source != op.source or any(isinstance(term, Dora) for term in own)
        ):
            self.findings.append(
                f"{key}: replaced or normalised by one adapter, changed by another"
            )
        return after

    def _with(self, op: Op, slot: Slot, name: str) -> Op:
        """Add the replacement and the terms that are listed under `name`."""
        self.used.add(name)
        source = self.changes.replacements.get(name)
        if source is not None:
            self.replaced[op.source] = source
            shape = self.changes.shapes.get(name)
            if shape is not None and not slot.is_renamed:
                self.findings.append(
                    f"{slot.live}: has another size, but the base stores it in parts"
                )
            op = replace(
                op,
                shape=shape or op.shape,
                source=source,
                source_dtype=self.adapters[source].dtype,
                start=slot.start,
                transpose=slot.transpose,
            )
        terms = list(self._terms(slot, self.changes.terms.get(name, ())))
        if terms and not is_float(op.source_dtype):
            tensor = describe(op.shape, op.source_dtype)
            self.findings.append(f"{op.key}: {tensor} is not a float tensor, so it cannot change")
        return replace(op, terms=(*op.terms, *terms))

    def _terms(self, slot: Slot, terms: Sequence[Term]) -> Iterator[Term]:
        for term in terms:
            if absent := [name for name in operands(term) if name not in self.adapters]:
                self.findings.append(f"{slot.live}: no adapter has {', '.join(absent)}")
                continue
            try:
                yield carry(term, slot, self.adapters)
            except ValueError as error:
                self.findings.append(str(error))

    def _quantization(self, op: Op, slot: Slot) -> Mapping[str, Any] | None:
        """Return the 4-bit settings that apply to a tensor; None for none.

        They never apply to a tensor that an adapter replaces.
        """
        quantization = self.settings.quantization
        if quantization is None or op.input != self.settings.base:
            return None
        # The 4-bit loader also quantises GPT-2's Conv1D layers, transposed.
        module, _, leaf = slot.live.rpartition(".")
        turned = leaf == "weight" and self.model.modules.get(module) == CONV1D
        if op.key not in self.settings.quantized and not turned:
            return None
        quantization = {**quantization, "turned": True} if turned else quantization
        return quantization if op.terms or quantization.get("base") == "dequantized" else None


def carry(term: Term, slot: Slot, operands: Mapping[str, TensorLike]) -> Term:
    """Return the term of a live tensor for its part on disk.

    Args:
        term: term of the live tensor.
        slot: position of the tensor on disk in the live tensor.
        operands: adapter tensors by their names in terms.

    Raises:
        ValueError: there is no such term, because the arithmetic needs more than the part.
    """
    if slot.is_all:
        return _turned(term) if slot.transpose else term
    if not isinstance(term, LowRank | Dora):
        kind = "a bias" if isinstance(term, Add) else "trained rows"
        raise ValueError(f"{slot.live}: {kind} on a tensor that is stored in parts")
    expert, row = _row(slot)
    if isinstance(term, Dora):
        if expert or term.transpose or slot.transpose:
            raise ValueError(
                f"{slot.live}: DoRA needs the norms of all rows, but {slot.key} is only a part"
            )
        return replace(term, out_start=term.out_start + row)
    if term.experts > 1:
        term = term.of_expert(expert, operands[term.a].shape[0])
    elif expert:
        raise ValueError(f"{slot.live}: a stack of experts, but {term.a} is for one matrix")
    if not slot.transpose:
        return replace(term, out_start=term.out_start + row)
    if prod(slot.shape) != prod(slot.live_shape[-2:]):
        raise ValueError(f"{slot.key}: a transposed part of {slot.live} cannot be changed")
    return _turned(term)


def _turned(term: Term) -> Term:
    if isinstance(term, LowRank | Dora):
        return replace(term, transpose=not term.transpose)
    raise ValueError(f"{type(term).__name__}: not supported on a tensor that is stored transposed")


def _row(slot: Slot) -> tuple[int, int]:
    """Return the expert whose matrix contains the part, and the part's first row in that matrix."""
    shape: Shape = (1, 1, *slot.live_shape)
    rows, columns = shape[-2:]
    row, column = divmod(slot.start, columns)
    expert, row = divmod(row, rows)
    height, rest = divmod(prod(slot.shape), columns)
    if column or rest or row + height > rows:
        raise ValueError(f"{slot.key}: is not a block of rows of one matrix of {slot.live}")
    return expert, row
