"""The changes that one or more adapters make to a model, by live name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from tasks.weights.adapters.findings import copy_of, hint_on, misfits
from tasks.weights.adapters.legacy_names import contract_by_names, in_memory
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.piece import Piece
from tasks.weights.adapters.pieces import Contract
from tasks.weights.adapters.read import Adapter
from tasks.weights.plan.adapter_ops import Dora, Rows, Term
from tasks.weights.plan.operations import Dropped

_FIRST = 3
"""Number of unexpected tensors to name if none of an adapter's tensors is expected."""


@dataclass(frozen=True)
class Checked:
    """An adapter that was checked against a model.

    Attributes:
        adapter: the adapter.
        weight: factor of its change in the sum.
        pieces: its changes, by live name; by key on disk if that is a part of a live tensor.
        dropped: its tensors that the merge does not use.
        copies: (dropped tensor, tensor that must have the same bytes).
        findings: everything that is wrong; if not empty, ignore the other attributes.
    """

    adapter: Adapter
    weight: float
    pieces: tuple[Piece, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    findings: tuple[str, ...] = ()


def check(adapter: Adapter, weight: float, live: LiveModel) -> Checked:
    """Compare the tensors of an adapter with its configuration and the model.

    Args:
        adapter: the adapter.
        weight: factor of its change; a finite number other than 0.
        live: the model that it was trained on.
    """
    where = f"{adapter.root.name}: " if adapter.name != "adapter" else ""
    if adapter.findings:
        texts = tuple(f"{where}adapter_config.json: {finding}" for finding in adapter.findings)
        return Checked(adapter, weight, findings=texts)
    contract = contract_by_names(Contract(adapter.config, live, adapter.tensors.tensors))
    findings = [*contract.findings, *misfits(contract)]
    dropped: list[Dropped] = []
    copies: list[tuple[str, str]] = []
    leftovers = _leftovers(adapter, contract, dropped, copies)
    fits = not contract.file_tensors.keys().isdisjoint(contract.wanted())
    findings += leftovers if fits else islice(leftovers, _FIRST)
    if not math.isfinite(weight) or weight == 0:
        findings.append(f"weight {weight} of the adapter is not a finite number other than 0")
    return Checked(
        adapter,
        weight,
        tuple(replace(piece, target=in_memory(live, piece.target)) for piece in contract.pieces),
        tuple(dropped),
        tuple(copies),
        tuple(where + finding for finding in findings),
    )


def _leftovers(
    adapter: Adapter,
    contract: Contract,
    dropped: list[Dropped],
    copies: list[tuple[str, str]],
) -> Iterator[str]:
    """Drop known copies with a reason; any other tensor that is not expected is a finding."""
    wanted = contract.wanted()
    absent = sorted(set(wanted) - set(contract.file_tensors))
    for key in sorted(set(contract.file_tensors) - set(wanted)):
        copy = copy_of(key, contract, wanted)
        if copy is not None:
            dropped.append(Dropped(f"{adapter.name}:{key}", copy.reason))
            if copy.of:
                copies.append((f"{adapter.name}:{key}", f"{adapter.name}:{copy.of}"))
            continue
        hint = hint_on(key, absent, contract.live)
        absent = []  # search for a near match once: it is slow, and one hint is enough
        yield f"{key}: unexpected" + (f": {hint}" if hint else "")


@dataclass(frozen=True)
class Changes:
    """Changes of live tensors; a tensor that is not named stays as it is.

    A tensor can have a replacement and terms; the terms then apply to the replacement. If an
    adapter changes only a part of a live tensor (one expert of a stack, see `legacy_names`), the
    part's key on disk is used as the live name, and its terms come after those of the stack.

    Attributes:
        terms: terms by live name, in order; operands are "<adapter>:<key>".
        replacements: "<adapter>:<key>" of the tensor that replaces the base's, by live name.
        shapes: shape by live name of replacements with another number of rows (a vocabulary that
            grew).
        unties: live names that were tied and have to be stored separately from now on;
            config.json then needs `tie_word_embeddings: false`. Without a replacement or terms,
            such a tensor is a copy of the base tensor that it was tied to. A change of any other
            tied tensor applies to all its names and is listed under the stored name.
        dropped: adapter tensors that the merge does not use.
        copies: dropped tensor -> tensor that must have the same bytes.
        findings: everything that is wrong; if not empty, ignore the other attributes.
    """

    terms: Mapping[str, tuple[Term, ...]]
    replacements: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    unties: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    copies: Mapping[str, str]
    findings: tuple[str, ...]


def changes(adapters: Sequence[tuple[Adapter, float]], live: LiveModel) -> Changes:
    """Combine several adapters, each with a weight.

    The result is `W + sum_i w_i * scale_i * B_i @ A_i`, added in the order given. peft gives the
    same when it merges one adapter after another, each with `set_scale(w)`, and the same up to
    rounding with `add_weighted_adapter(combination_type="cat")`. (Its "linear" sums the factors
    instead, and so multiplies every B with every A.)

    Args:
        adapters: adapters with different names, each with its weight; 1.0 merges it as trained.
        live: the model that the adapters were trained on.
    """
    total = _Sum(live)
    for adapter, weight in adapters:
        total.add(check(adapter, weight, live))
    if len({adapter.name for adapter, _ in adapters}) < len(adapters):
        total.findings.append("two adapters have the same name")
    if not adapters:
        total.findings.append("no adapter to merge")
    return total.result()


class _Sum:
    """Running sum of adapters."""

    def __init__(self, live: LiveModel) -> None:
        self.live = live
        self.findings: list[str] = []
        self.parts: list[Checked] = []
        self.terms: dict[str, list[Term]] = {}
        self.replacements: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(self, part: Checked) -> None:
        """Add one adapter's pieces and findings."""
        self.parts.append(part)
        self.findings += part.findings

    def result(self) -> Changes:
        """Combine all pieces, under the names that the tensors will be stored under."""
        untied = {
            name
            for part in self.parts
            for piece in part.pieces
            if piece.alone
            for name in self.live.partners(piece.target)
        }
        for part in self.parts:
            already_changed = {*self.replacements, *self.terms}
            for piece in part.pieces:
                for name in self._names(piece, untied):
                    if name in already_changed and (piece.stored or name in self.replacements):
                        self.findings.append(f"{name}: replaced by one adapter, changed by another")
                    self._enter(name, piece, part)
        self._check_rows()
        return Changes(
            terms={name: tuple(terms) for name, terms in self.terms.items()},
            replacements=dict(self.replacements),
            shapes=dict(self.shapes),
            unties=tuple(sorted(untied & set(self.live.tied))),
            dropped=tuple(entry for part in self.parts for entry in part.dropped),
            copies=dict(entry for part in self.parts for entry in part.copies),
            findings=tuple(self.findings),
        )

    def _names(self, piece: Piece, untied: set[str]) -> list[str]:
        """Return the stored tensors that a piece changes; several if they are no longer tied."""
        name = piece.target
        if name not in untied:
            return [self.live.tied.get(name, name)]
        return [name] if piece.alone else sorted(self.live.partners(name))

    def _enter(self, name: str, piece: Piece, part: Checked) -> None:
        """Add one piece under a name, with operands that name the adapter."""
        adapter, weight = part.adapter, part.weight
        if weight != 1 and (piece.stored or isinstance(piece.term, Rows)):
            self.findings.append(
                f"{name}: is stored as a full tensor, so weight {weight} cannot scale it"
            )
        if piece.stored:
            self.replacements[name] = f"{adapter.name}:{piece.stored}"
            stored = adapter.tensors.tensors.get(piece.stored)
            if stored is not None and tuple(stored.shape) != self._shape(name):
                self.shapes[name] = tuple(stored.shape)
        if piece.term is not None:
            self._enter_term(name, _bound(piece.term, adapter.name, weight))

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self.live.tensors.get(name)
        return tuple(self.live.stored[name].shape if tensor is None else tensor.shape)

    def _enter_term(self, name: str, term: Term) -> None:
        before = self.terms.setdefault(name, [])
        if before and any(isinstance(earlier, Dora) for earlier in (*before, term)):
            self.findings.append(
                f"{name}: DoRA normalises the weights of the base, so its change cannot be added to"
                " another adapter's, and a merge of one after the other is not their sum: deliver"
                " each of them alone, source=<its folder>, or train one with all the data"
            )
        rows = {row for earlier in before if isinstance(earlier, Rows) for row in earlier.indices}
        if isinstance(term, Rows) and rows & set(term.indices):
            self.findings.append(
                f"{name}: two adapters replace row {min(rows & set(term.indices))}"
            )
        before.append(term)

    def _check_rows(self) -> None:
        rows = {
            shape[0]
            for module in (self.live.input_embedding, self.live.output_embedding)
            for name in self.live.partners(f"{module}.weight")
            if (shape := self.shapes.get(name))
        }
        if len(rows) > 1:
            sizes = " and ".join(map(str, sorted(rows)))
            self.findings.append(f"input and output embedding need equal rows, but have {sizes}")


def _bound(term: Term, adapter: str, weight: float) -> Term:
    """Return the term with operands "<adapter>:<key>" and its scale times the weight."""
    names: dict[str, Any] = {
        field: f"{adapter}:{getattr(term, field)}"
        for field in ("a", "b", "magnitude", "values", "value")
        if hasattr(term, field)
    }
    if isinstance(term, Rows):
        return replace(term, **names)
    return replace(term, **names, scale=term.scale * weight)
