"""The operations of a merge, one for each tensor of the base on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from tasks.core.contract import TensorLike, describe
from tasks.weights.adapters.changes import Changes
from tasks.weights.adapters.live import CONV1D
from tasks.weights.families.places import Place
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Term, operands
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Op
from tasks.weights.rounding import Rounding


@dataclass(frozen=True)
class MergeSettings:
    """Settings of a merge.

    Attributes:
        dtype: safetensors name for all floats; None keeps the dtype of each tensor.
        quantization: 4-bit settings of training, as in `Op.quantization`, for the tensors that
            training stored in 4 bits. With "base": "dequantized" they also apply to tensors that
            no adapter changes. None if training used no quantization.
        quantized: keys of the tensors that training stored in 4 bits.
        max_shard_bytes: limit of tensor data in one output file; None writes a single file.
        base: name of the base among the inputs of the plan.
        rounding: rounding of what the adapters change; see `rounding.py`.
    """

    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None
    quantized: frozenset[str] = frozenset()
    max_shard_bytes: int | None = None
    base: str = "base"
    rounding: Rounding = "unbiased"


@dataclass
class MergeOps:
    """One pass over the base's tensors. Iterate over `ops` before reading the results.

    Attributes:
        base: header entries of the base checkpoint.
        facts: facts of the base's model.
        changes: changes of the model in memory.
        adapters: header entries of the adapters' tensors, by their names in terms.
        settings: settings of the merge.
        findings: result: everything that is wrong.
        replaced: result: source in the base -> source in an adapter that replaces it.
        untied: result: keys that were tied and are stored separately from now on.
        copied: result: keys that store a replaced tensor a second time, since they stay tied.
    """

    base: Mapping[str, TensorLike]
    facts: ModelFacts
    changes: Changes
    adapters: Mapping[str, TensorLike]
    settings: MergeSettings
    findings: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def ops(self) -> Iterator[Op]:
        """Yield an operation for each tensor of the base, then those for untied tensors."""
        places: dict[str, list[Place]] = defaultdict(list)
        for place in self.facts.places:
            places[place.disk].append(place)
        for key, info in self.base.items():
            key_places = places.pop(key, [])
            if any(place.shape != tuple(info.shape) for place in key_places):
                self.findings.append(f"{key}: is {list(info.shape)}, the model's facts differ")
                continue
            yield self._rounded(self._op(key, key_places))
        self.findings += [f"{key}: not in the base" for key in places]
        yield from map(self._rounded, self._stored_apart())
        changed = {*self.changes.terms, *self.changes.replacements}
        self.findings += [
            f"{name}: changed by the adapter, but no tensor of the base contains it"
            for name in sorted(changed - self._used)
            if not self.facts.findings  # this finding would only repeat them
        ]

    def _rounded(self, op: Op) -> Op:
        """Round what an adapter changes or replaces as the settings say."""
        changed = bool(op.terms) or op.input != self.settings.base
        return replace(op, unbiased=changed and self.settings.rounding == "unbiased")

    def _op(self, key: str, places: Sequence[Place]) -> Op:
        if len(places) == 1 and places[0].whole:
            return self._changed(key, key, places[0])
        for place in places:
            if self._name(place.live) in {*self.changes.terms, *self.changes.replacements}:
                self._used.add(self._name(place.live))
                self.findings.append(
                    f"{place.live}: changed by the adapter; stored fused with others in {key}, "
                    "which this merge cannot split: merge it with peft's merge_and_unload"
                )
        op = self._by_key(self._plain(key, key))
        quantization = self._quantization(op, places[0], op.terms) if places else None
        if quantization is not None and quantization.get("base") == "dequantized":
            self.findings.append(f"{key}: fuses layers that training quantised one by one")
        return op

    def _stored_apart(self) -> Iterator[Op]:
        """Yield the operations of untied tensors that have no key in the base yet."""
        stored = {place.live: place for place in self.facts.places}
        for alias in self.changes.unties:
            key = self.facts.aliases[alias]
            self.untied.append(key)
            holder = stored.get(self.facts.live.tied[alias])
            if alias in stored or holder is None:
                continue
            place = Place(key, holder.shape, alias, holder.live_shape, transpose=holder.transpose)
            yield self._changed(key, holder.disk, place)

    def _changed(self, name: str, key: str, place: Place) -> Op:
        """Return the operation that writes base tensor `key`, changed at `place`, as `name`."""
        live = self._name(place.live)
        if live != place.live and live in self.changes.replacements:
            self.copied.append(name)
        op = self._with(self._plain(name, key), place, live)
        op = self._by_key(op)
        return replace(op, quantization=self._quantization(op, place, op.terms))

    def _by_key(self, op: Op) -> Op:
        """Add the changes that name the tensor by its key on disk; see `legacy_names`."""
        key = op.name
        stored = self.facts.live.stored.get(key)
        if stored is None or stored.whole:
            return op
        changed = op.terms or op.input != self.settings.base
        changed_op = self._with(op, Place(key, op.shape, key, op.shape), key)
        own = changed_op.terms[len(op.terms) :]
        if changed and (
            changed_op.source != op.source or any(isinstance(term, Dora) for term in own)
        ):
            self.findings.append(
                f"{key}: replaced or normalised by one adapter, changed by another"
            )
        return changed_op

    def _with(self, op: Op, place: Place, name: str) -> Op:
        """Add the replacement and the terms that are listed under `name`."""
        self._used.add(name)
        replacement = self.changes.replacements.get(name)
        if replacement is not None:
            self.replaced[op.source] = replacement
            op = self._replaced(op, place, replacement, self.changes.shapes.get(name))
        terms = self._terms(place, self.changes.terms.get(name, ()))
        if terms and not is_float(op.source_dtype):
            tensor = describe(op.shape, op.source_dtype)
            self.findings.append(f"{op.key}: {tensor} is not a float tensor, so it cannot change")
        return replace(op, terms=(*op.terms, *terms))

    def _quantization(
        self, op: Op, place: Place, terms: Sequence[Term]
    ) -> Mapping[str, Any] | None:
        """Return the 4-bit settings that apply to a tensor; None for none.

        They never apply to a tensor that an adapter replaces.
        """
        quantization = self.settings.quantization
        if quantization is None or op.input != self.settings.base:
            return None
        # The 4-bit loader also quantises GPT-2's Conv1D layers, transposed.
        module, _, leaf = place.live.rpartition(".")
        turned = leaf == "weight" and self.facts.live.modules.get(module) == CONV1D
        if op.key not in self.settings.quantized and not turned:
            return None
        quantization = {**quantization, "turned": True} if turned else quantization
        return quantization if terms or quantization.get("base") == "dequantized" else None

    def _plain(self, name: str, key: str) -> Op:
        """Return the operation that writes base tensor `key` unchanged, in the output dtype."""
        info, settings = self.base[key], self.settings
        keep = settings.dtype is None or not is_float(info.dtype)
        return Op(
            name=name,
            shape=tuple(info.shape),
            dtype=info.dtype if keep else str(settings.dtype),
            source=f"{settings.base}:{key}",
            source_dtype=info.dtype,
        )

    def _replaced(self, op: Op, place: Place, source: str, shape: tuple[int, ...] | None) -> Op:
        """Replace the source by an adapter's tensor, which has the layout of memory."""
        if shape is not None and (not place.is_all or place.transpose):
            self.findings.append(f"{place.live}: has another size, but the base stores it in parts")
        return replace(
            op,
            shape=shape or op.shape,
            source=source,
            source_dtype=self.adapters[source].dtype,
            start=place.start,
            transpose=place.transpose,
        )

    def _terms(self, place: Place, terms: Sequence[Term]) -> tuple[Term, ...]:
        carried = []
        for term in terms:
            if absent := [name for name in operands(term) if name not in self.adapters]:
                self.findings.append(f"{place.live}: no adapter has {', '.join(absent)}")
                continue
            try:
                carried.append(carry(term, place, self.adapters))
            except ValueError as error:
                self.findings.append(str(error))
        return tuple(carried)

    def _name(self, live: str) -> str:
        """Return the name under which `Changes` lists a live tensor."""
        apart = live in self.changes.unties
        return live if apart else self.facts.live.tied.get(live, live)


def carry(term: Term, place: Place, operands: Mapping[str, TensorLike]) -> Term:
    """Return the term for the tensor on disk.

    Args:
        term: term of the live tensor.
        place: place of the tensor on disk in the live tensor.
        operands: adapter tensors by their names in terms.

    Raises:
        ValueError: there is no such term, because the arithmetic needs more than the part.
    """
    if place.is_all:
        return _turned(term) if place.transpose else term
    if not isinstance(term, LowRank | Dora):
        kind = "a bias" if isinstance(term, Add) else "trained rows"
        raise ValueError(f"{place.live}: {kind} on a tensor that is stored in parts")
    expert, row = _row(place)
    if isinstance(term, Dora):
        if expert or term.transpose or place.transpose:
            raise ValueError(
                f"{place.live}: DoRA needs the norms of all rows, but {place.disk} is only a part"
            )
        return replace(term, out_start=term.out_start + row)
    if term.experts > 1:
        term = term.of_expert(expert, operands[term.a].shape[0])
    elif expert:
        raise ValueError(f"{place.live}: a stack of experts, but {term.a} is for one matrix")
    if not place.transpose:
        return replace(term, out_start=term.out_start + row)
    if prod(place.shape) != prod(place.live_shape[-2:]):
        raise ValueError(f"{place.disk}: a transposed part of {place.live} cannot be changed")
    return _turned(term)


def _turned(term: Term) -> Term:
    if isinstance(term, LowRank | Dora):
        return replace(term, transpose=not term.transpose)
    raise ValueError(f"{term.kind}: not supported on a tensor that is stored transposed")


def _row(place: Place) -> tuple[int, int]:
    """Return the expert whose matrix contains the part, and the part's first row in that matrix.

    Raises:
        ValueError: the part is not a block of full rows of one matrix.
    """
    *stack, rows, columns = 1, 1, *place.live_shape
    row, column = divmod(place.start, columns)
    expert, row = divmod(row, rows)
    height, rest = divmod(prod(place.shape), columns)
    if column or rest or row + height > rows or prod(stack) != prod(place.live_shape[:-2]):
        raise ValueError(f"{place.disk}: is not a block of rows of one matrix of {place.live}")
    return expert, row
