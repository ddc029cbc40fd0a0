"""The operations of a merge: what happens to each tensor of the base on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.core.contract import TensorLike, describe
from tasks.weights.adapters.changes import Changes
from tasks.weights.adapters.live import CONV1D
from tasks.weights.families.carry import carry
from tasks.weights.families.places import Place
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.plan.adapter_ops import Dora, Term, operands
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Op


@dataclass(frozen=True)
class MergeSettings:
    """What a merge makes of its inputs.

    Attributes:
        dtype: safetensors name for all floats; None keeps each tensor's own.
        quantization: what tensors that training held in 4 bits go through, as `Op.quantization`
            says it; its "base" tells whether those that no adapter changes do, too.
        quantized: keys of those tensors.
        max_shard_bytes: of tensor data in one output file.
        base: name of the input that the base is.
    """

    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None
    quantized: frozenset[str] = frozenset()
    max_shard_bytes: int | None = None
    base: str = "base"


@dataclass
class MergeOps:
    """One pass over the base's tensors.

    Attributes:
        base, facts, changes, adapters, settings: as of `plan_merge`.
        findings: everything that is wrong; whole once `ops` has been gone through, as the rest is.
        replaced: source in the base -> source in an adapter that is stored in its place.
        untied: keys that were tied and are stored apart from now on.
    """

    base: Mapping[str, TensorLike]
    facts: ModelFacts
    changes: Changes
    adapters: Mapping[str, TensorLike]
    settings: MergeSettings
    findings: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def ops(self) -> Iterator[Op]:
        """An operation a tensor of the base, then those that are stored for the first time."""
        places: dict[str, list[Place]] = defaultdict(list)
        for place in self.facts.places:
            places[place.disk].append(place)
        for key, info in self.base.items():
            found = places.pop(key, [])
            if any(place.shape != tuple(info.shape) for place in found):
                self.findings.append(f"{key}: is {list(info.shape)}, the model's facts differ")
                continue
            yield self._op(key, found)
        self.findings += [f"{key}: not in the base" for key in places]
        yield from self._stored_apart()
        changed = {*self.changes.terms, *self.changes.replacements}
        self.findings += [
            f"{name}: changed by the adapter, made by no tensor of the base"
            for name in sorted(changed - self._used)
            if not self.facts.findings  # of which this would only be the echo
        ]

    def _op(self, key: str, places: Sequence[Place]) -> Op:
        """The operation for one tensor of the base."""
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
        asked = self._quantization(op, places[0], op.terms) if places else None
        if asked is not None and asked.get("base") == "dequantized":
            self.findings.append(f"{key}: joins layers that training held in 4 bits one by one")
        return op

    def _stored_apart(self) -> Iterator[Op]:
        """Tensors that were tied, are not any more, and have no key in the base yet."""
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
        """Base tensor `key` with what happens to `place`, as output `name`."""
        op = self._with(self._plain(name, key), place, self._name(place.live))
        op = self._by_key(op)
        return replace(op, quantization=self._quantization(op, place, op.terms))

    def _by_key(self, op: Op) -> Op:
        """The operation with what an adapter does to this very tensor on disk; see `older`."""
        key = op.name
        stored = self.facts.live.stored.get(key)
        if stored is None or stored.whole:
            return op
        changed = op.terms or op.input != self.settings.base
        found = self._with(op, Place(key, op.shape, key, op.shape), key)
        own = found.terms[len(op.terms) :]
        if changed and (found.source != op.source or any(isinstance(one, Dora) for one in own)):
            self.findings.append(
                f"{key}: replaced or normalised by one adapter, changed by another"
            )
        return found

    def _with(self, op: Op, place: Place, name: str) -> Op:
        """The operation with the replacement and the terms that are listed under `name`."""
        self._used.add(name)
        replacement = self.changes.replacements.get(name)
        if replacement is not None:
            self.replaced[op.source] = replacement
            op = self._replaced(op, place, replacement, self.changes.shapes.get(name))
        terms = self._terms(place, self.changes.terms.get(name, ()))
        if terms and not is_float(op.source_dtype):
            held = describe(op.shape, op.source_dtype)
            self.findings.append(f"{op.key}: {held} is no float tensor to add to")
        return replace(op, terms=(*op.terms, *terms))

    def _quantization(
        self, op: Op, place: Place, terms: Sequence[Term]
    ) -> Mapping[str, Any] | None:
        """The 4 bits that a tensor goes through; a stored replacement never does."""
        asked = self.settings.quantization
        if asked is None or op.input != self.settings.base:
            return None
        # GPT-2's layers are no `Linear`, and the 4-bit loader takes them all the same: transposed.
        module, _, leaf = place.live.rpartition(".")
        turned = leaf == "weight" and self.facts.live.modules.get(module) == CONV1D
        if op.key not in self.settings.quantized and not turned:
            return None
        asked = {**asked, "turned": True} if turned else asked
        return asked if terms or asked.get("base") == "dequantized" else None

    def _plain(self, name: str, key: str) -> Op:
        """Base tensor `key` as it is, in the dtype asked for."""
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
        """The operation with a stored tensor, in the layout of memory, in place of the base's."""
        if shape is not None and (not place.is_all or place.transpose):
            self.findings.append(f"{place.live}: has another size, and is stored in parts")
        return replace(
            op,
            shape=shape or op.shape,
            source=source,
            source_dtype=self.adapters[source].dtype,
            start=place.start,
            transpose=place.transpose,
        )

    def _terms(self, place: Place, terms: Sequence[Term]) -> tuple[Term, ...]:
        found = []
        for term in terms:
            if absent := [name for name in operands(term) if name not in self.adapters]:
                self.findings.append(f"{place.live}: no adapter holds {', '.join(absent)}")
                continue
            try:
                found.append(carry(term, place, self.adapters))
            except ValueError as error:
                self.findings.append(str(error))
        return tuple(found)

    def _name(self, live: str) -> str:
        """The name under which changes of a live tensor are listed."""
        apart = live in self.changes.unties
        return live if apart else self.facts.live.tied.get(live, live)
