"""The plan of a merge: one operation a tensor on disk, whatever the model calls it in memory.

    plan = plan_merge(base.tensors, facts, changes(adapters, facts.live), operands)

Keys, shapes and order of the output are those of the base checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.contract import TensorLike, describe
from tasks.errors import ContractError
from tasks.weights.adapters.changes import Changes
from tasks.weights.adapters.live import CONV1D
from tasks.weights.bits import is_float
from tasks.weights.contracts import ModelFacts
from tasks.weights.families.carry import carry
from tasks.weights.families.places import Place
from tasks.weights.plan import Dropped, Op, Plan
from tasks.weights.terms import Term, operands
from tasks.weights.vocabulary import resized_config

_SHOWN = 100


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


def plan_merge(
    base: Mapping[str, TensorLike],
    facts: ModelFacts,
    changes: Changes,
    adapters: Mapping[str, TensorLike],
    settings: MergeSettings = MergeSettings(),
) -> Plan:
    """Plan a merge from headers alone.

    Args:
        base: header entries of the base checkpoint.
        facts: of the base's model, made with the keys of that checkpoint.
        changes: what the adapters do to the model in memory.
        adapters: header entries of their tensors, by the names that terms have for them.
        settings: what to make of it.

    Returns:
        The plan; `notes["untied"]` lists keys that were tied and no longer are: config.json then
        has to say `tie_word_embeddings: false`. `notes["rows"]`: rows of embeddings that grew.

    Raises:
        ContractError: listing every finding about the base, the adapters and how they fit.
    """
    planner = _Planner(base, facts, changes, adapters, settings)
    # Changes with findings are not to be used: what they say themselves is all there is to say.
    ops = [] if changes.findings else list(planner.ops())
    findings = [*facts.findings, *changes.findings, *planner.findings]
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ContractError(
            f"merge: adapter and base do not fit: {findings[0]}{more}", details=findings[:_SHOWN]
        )
    rows = {name: shape[0] for name, shape in changes.shapes.items()}
    notes: dict[str, Any] = {"untied": planner.untied} if planner.untied else {}
    notes |= {"rows": rows} if rows else {}
    used = {op.source for op in ops}
    dropped = [
        Dropped(source, f"replaced by {by}")
        for source, by in planner.replaced.items()
        if source not in used
    ]
    return Plan(tuple(ops), (*changes.dropped, *dropped), settings.max_shard_bytes, notes)


def merged_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json of the base, with what a merge changed about the model's shape."""
    rows = set(plan.notes.get("rows", {}).values())
    merged = resized_config(config, max(rows)) if rows else dict(config)
    return {**merged, "tie_word_embeddings": False} if plan.notes.get("untied") else merged


@dataclass
class _Planner:
    """One pass over the base's tensors."""

    base: Mapping[str, TensorLike]
    facts: ModelFacts
    changes: Changes
    adapters: Mapping[str, TensorLike]
    settings: MergeSettings
    findings: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

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
            for name in sorted(changed - self.used)
            if not self.facts.findings  # of which this would only be the echo
        ]

    def _op(self, key: str, places: Sequence[Place]) -> Op:
        """The operation for one tensor of the base."""
        if len(places) == 1 and places[0].whole:
            return self._changed(key, key, places[0])
        for place in places:
            if self._name(place.live) in {*self.changes.terms, *self.changes.replacements}:
                self.used.add(self._name(place.live))
                self.findings.append(
                    f"{place.live}: changed by the adapter; stored fused with others in {key}, "
                    "which this merge cannot split"
                )
        return self._plain(key, key)

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
        live = self._name(place.live)
        self.used.add(live)
        op = self._plain(name, key)
        replacement = self.changes.replacements.get(live)
        if replacement is not None:
            self.replaced[op.source] = replacement
            op = self._replaced(op, place, replacement, self.changes.shapes.get(live))
        terms = self._terms(place, self.changes.terms.get(live, ()))
        if terms and not is_float(op.source_dtype):
            self.findings.append(
                f"{key}: {describe(op.shape, op.source_dtype)} is no float tensor to add to"
            )
        return replace(op, terms=terms, quantization=self._quantization(op, place, terms))

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
        return Op(
            name=name,
            shape=tuple(info.shape),
            dtype=self._dtype(info),
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

    def _dtype(self, info: TensorLike) -> str:
        keep = self.settings.dtype is None or not is_float(info.dtype)
        return info.dtype if keep else str(self.settings.dtype)
