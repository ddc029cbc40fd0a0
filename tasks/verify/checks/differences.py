"""Find where two token sequences part, and what kind of difference it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW = 6
_FEWEST, _FEWEST_CUT = 3, 8
"""Tokens that have to agree after an insertion, so that it is one."""


@dataclass(frozen=True)
class Difference:
    """First difference of two token sequences.

    Attributes:
        kind: "bos-twice", "bos-added", "bos-missing", "inserted", "removed",
            "generation-prompt-missing", "generation-prompt-longer" or "other".
        position: first token that differs.
        trained: tokens of the training from there on, a few of them.
        served: tokens of the server from there on.
    """

    kind: str
    position: int
    trained: tuple[int, ...]
    served: tuple[int, ...]


def difference(
    trained: Sequence[int], served: Sequence[int], *, cut: bool = False, bos: int | None = None
) -> Difference | None:
    """Return the first difference; None if there is none.

    Args:
        trained: token ids of the training.
        served: token ids of the server.
        cut: True if `trained` is only the beginning of a longer sequence.
        bos: token that begins a sequence; None if there is none.
    """
    trained, served = tuple(trained), tuple(served)
    if trained == (served[: len(trained)] if cut else served):
        return None
    pairs = zip(trained, served, strict=False)
    position = next((at for at, (t, s) in enumerate(pairs) if t != s), None)
    at = min(len(trained), len(served)) if position is None else position
    kind = _kind(trained, served, at, cut, bos)
    window = slice(at, at + _WINDOW)
    return Difference(kind, at, trained[window], served[window])


def _kind(
    trained: tuple[int, ...], served: tuple[int, ...], at: int, cut: bool, bos: int | None
) -> str:
    if served[:1] and _same(trained, served[1:], cut):
        if served[:1] == trained[:1] and bos in (None, served[0]):
            return "bos-twice"
        if bos in (None, served[0]):
            return "bos-added"
    if trained[:1] and bos in (None, trained[0]) and _same(trained[1:], served, cut):
        return "bos-missing"
    if at == len(served):
        return "generation-prompt-missing"
    if at == len(trained):
        return "generation-prompt-longer"
    for count in range(1, max(len(trained), len(served))):
        if _overlap(trained[at:], served[at + count :], cut):
            return "inserted"
        if _overlap(trained[at + count :], served[at:], cut):
            return "removed"
    return "other"


def _same(trained: tuple[int, ...], served: tuple[int, ...], cut: bool) -> bool:
    size = min(len(trained), len(served)) if cut else max(len(trained), len(served))
    return size > 0 and trained[:size] == served[:size]


def _overlap(trained: tuple[int, ...], served: tuple[int, ...], cut: bool) -> bool:
    """Return True if both go on alike to their ends, or to where `trained` was cut."""
    size = min(len(trained), len(served))
    return size >= (_FEWEST_CUT if cut else _FEWEST) and _same(trained, served, cut)
