"""What adapters do to a model: terms and replacements by live name, or every reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.weights.adapters.checking import Checked, check
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.piece import Piece
from tasks.weights.adapters.read import Adapter
from tasks.weights.plan.adapter_ops import Dora, Rows, Term
from tasks.weights.plan.operations import Dropped


@dataclass(frozen=True)
class Changes:
    """What becomes of the live tensors; those that are not named stay as they are.

    A tensor can be replaced and have terms: the terms then apply to what replaced it. Where an
    adapter speaks of what is only a part of a live tensor (one expert of a stack, see `older`), the
    part's key on disk stands in the place of a live name; its terms come after those of the stack.

    Attributes:
        terms: by live name, in order. Operands are "<adapter>:<key>".
        replacements: "<adapter>:<key>" of the stored tensor, by live name.
        shapes: of replaced tensors whose rows are not the model's: a vocabulary that grew.
        unties: names that a live tensor shared with another one and that have to be stored apart
            from now on: each holds its partner's base tensor unless replaced or given terms, and
            config.json has to say `tie_word_embeddings: false`. A change of a tied tensor that is
            not among them holds for all its names and is listed under the name that is stored.
        dropped: adapter tensors that go nowhere.
        copies: those of them that have to have the bytes of another one, and of which.
        findings: everything that is wrong; use nothing else while there are any.
    """

    terms: Mapping[str, tuple[Term, ...]]
    replacements: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    unties: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    copies: Mapping[str, str]
    findings: tuple[str, ...]


def changes(adapters: Sequence[tuple[Adapter, float]], live: LiveModel) -> Changes:
    """What several adapters, each with a weight, do together.

    With weights w the result is `W + sum_i w_i * scale_i * B_i @ A_i`, added in the order given:
    what peft gives when it merges one adapter after another, each with `set_scale(w)`, and the same
    up to rounding as `add_weighted_adapter(combination_type="cat")`. (Its "linear" is something
    else: it sums the factors, and so adds every B to every A.)

    Args:
        adapters: with their weights; 1.0 for one that is merged as it was trained. Names differ.
        live: the model that the adapters were made on.
    """
    found = _Sum(live)
    for adapter, weight in adapters:
        found.add(check(adapter, weight, live))
    if len({adapter.name for adapter, _ in adapters}) < len(adapters):
        found.findings.append("two adapters have the same name")
    if not adapters:
        found.findings.append("no adapter given")
    return found.result()


class _Sum:
    """Adapters as they are added up."""

    def __init__(self, live: LiveModel) -> None:
        self.live = live
        self.findings: list[str] = []
        self.parts: list[Checked] = []
        self.terms: dict[str, list[Term]] = {}
        self.replacements: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(self, part: Checked) -> None:
        """Keep one adapter's pieces and what is wrong with it."""
        self.parts.append(part)
        self.findings += part.findings

    def result(self) -> Changes:
        """All pieces put together, under the names that the tensors have from now on."""
        apart = {
            name
            for part in self.parts
            for piece in part.pieces
            if piece.alone
            for name in self.live.partners(piece.target)
        }
        for part in self.parts:
            others = {*self.replacements, *self.terms}
            for piece in part.pieces:
                for name in self._names(piece, apart):
                    if name in others and (piece.stored or name in self.replacements):
                        self.findings.append(
                            f"{name}: stored whole by one adapter, changed by another"
                        )
                    self._enter(name, piece, part)
        self._check_rows()
        return Changes(
            terms={name: tuple(terms) for name, terms in self.terms.items()},
            replacements=dict(self.replacements),
            shapes=dict(self.shapes),
            unties=tuple(sorted(apart & set(self.live.tied))),
            dropped=tuple(one for part in self.parts for one in part.dropped),
            copies=dict(one for part in self.parts for one in part.copies),
            findings=tuple(self.findings),
        )

    def _names(self, piece: Piece, apart: set[str]) -> list[str]:
        """The stored tensors that a piece changes: every name of a tensor that no longer is one."""
        name = piece.target
        if name not in apart:
            return [self.live.tied.get(name, name)]
        return [name] if piece.alone else sorted(self.live.partners(name))

    def _enter(self, name: str, piece: Piece, part: Checked) -> None:
        """Add one piece, with operands that name the adapter."""
        adapter, weight = part.adapter, part.weight
        if weight != 1 and (piece.stored or isinstance(piece.term, Rows)):
            self.findings.append(
                f"{name}: is stored whole, so weight {weight} means nothing for it"
            )
        if piece.stored:
            self.replacements[name] = f"{adapter.name}:{piece.stored}"
            held = adapter.tensors.tensors.get(piece.stored)
            if held is not None and tuple(held.shape) != self._shape(name):
                self.shapes[name] = tuple(held.shape)
        if piece.term is not None:
            self._enter_term(name, _bound(piece.term, adapter.name, weight))

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self.live.tensors.get(name)
        return tuple(self.live.stored[name].shape if tensor is None else tensor.shape)

    def _enter_term(self, name: str, term: Term) -> None:
        before = self.terms.setdefault(name, [])
        if before and any(isinstance(one, Dora) for one in (*before, term)):
            self.findings.append(
                f"{name}: DoRA normalises the base's own weight, so it cannot be added to another "
                "adapter; merge one after the other"
            )
        rows = {row for one in before if isinstance(one, Rows) for row in one.indices}
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
            self.findings.append(f"embeddings of {' and '.join(map(str, sorted(rows)))} rows")


def _bound(term: Term, adapter: str, weight: float) -> Term:
    """The term with operands "<adapter>:<key>" and the adapter's weight in its scale."""
    names: dict[str, Any] = {
        field: f"{adapter}:{getattr(term, field)}"
        for field in ("a", "b", "magnitude", "values", "value")
        if hasattr(term, field)
    }
    if isinstance(term, Rows):
        return replace(term, **names)
    return replace(term, **names, scale=term.scale * weight)
