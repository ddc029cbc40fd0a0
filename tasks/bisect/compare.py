"""Compare two loaded models module by module, and judge the differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch

from tasks.bisect.calls import (
    Distance,
    Distances,
    Part,
    Recording,
    Weights,
    places,
    record,
    replay,
    weights_of,
)
from tasks.bisect.report import Divergence, TensorGap
from tasks.bisect.tensors import cause_of, compare
from tasks.serving.reference.load import input_device
from tasks.serving.reference.measure import other_sums

FACTOR = 4.0
"""Distances above this many times the noise are differences."""
EXPLAINED = 16
"""Differing modules whose cause is looked for."""
OTHERS = 1 << 30
"""Numbers of a's other tensors in which b's values are looked for."""


@dataclass(frozen=True)
class Compared:
    """Comparison of two models."""

    order: list[str]  # names of all modules, in the order of execution
    divergences: list[Divergence]  # in that order
    gaps: Mapping[str, list[TensorGap]]  # comparisons of all weights, by module
    exact: bool  # all outputs are equal bit for bit

    @property
    def roundings(self) -> set[str]:
        """Formats that explain differences of weights."""
        return {gap.rounding for gaps in self.gaps.values() for gap in gaps} - {""}


class Pair:
    """Two loaded models of transformers, in eval mode, and their modules.

    `quantised` says that one of the two declares quantised weights.
    """

    def __init__(self, a: Any, b: Any, quantised: bool = False) -> None:
        self.a, self.b, self.quantised = a, b, quantised
        self.in_a, self.in_b = places(a), places(b)
        self._called: list[str] = []
        self._distances: Distances = {}
        self._noise: Distances = {}  # a's own, in the coarser dtype

    @property
    def missing(self) -> list[str]:
        """Names of the modules that only one of the two has."""
        only_a = [f"{name}: only in a" for name in self.in_a if name not in self.in_b]
        return only_a + [f"{name}: only in b" for name in self.in_b if name not in self.in_a]

    def compare(
        self, probes: Sequence[Sequence[int]], recordings: Sequence[Recording] | None = None
    ) -> Compared:
        """Compare the models on some probes.

        Recordings of another engine that runs b are replayed in a, in place of a's calls in b.
        """
        gaps = {name: list(self._weight_gaps(name)) for name in self.in_a if name in self.in_b}
        self._measure(probes, recordings)
        order = list(dict.fromkeys([*self._called, *self.in_a]))
        differing = tuple(
            f"{name}." for name, each in gaps.items() if any(gap.different for gap in each)
        )
        rows = [
            row
            for name in order
            # Inside a module whose own weights differ, as an expert's activation, nothing is new.
            if not name.startswith(differing)
            for row in self._divergences(name, gaps.get(name, []))
        ]
        rows = [self._explained(row) for row in rows[:EXPLAINED]] + rows[EXPLAINED:]
        exact = all(not d.largest and not d.strange for d in self._distances.values())
        return Compared(order, rows, gaps, exact)

    def _weight_gaps(self, name: str) -> Iterator[TensorGap]:
        a, b = weights_of(self.in_a[name]), weights_of(self.in_b[name])
        for key in a.keys() & b.keys():
            yield compare(f"{name}.{key}", a[key], b[key])
        if not self.quantised:
            for key in a.keys() ^ b.keys():
                side = "a" if key in a else "b"
                shape = tuple((a if key in a else b)[key].shape)
                yield TensorGap(f"{name}.{key}", shape, problem=f"only in {side}")

    def _measure(
        self, probes: Sequence[Sequence[int]], recordings: Sequence[Recording] | None
    ) -> None:
        """Add up the distances by module and part, and those of a from itself, nudged."""
        nudge = max(torch.finfo(model.dtype).eps for model in (self.a, self.b))
        for number, probe in enumerate(probes):
            in_a, in_b = (
                torch.tensor([[*probe]], device=input_device(m)) for m in (self.a, self.b)
            )
            own = record(self.a, self.in_a, in_a)
            self._called = list(dict.fromkeys([*self._called, *own]))
            if recordings is None:
                shared = {name: calls for name, calls in own.items() if name in self.in_b}
                here = {name: m for name, m in self.in_b.items() if name in self.in_a}
                replay(self.b, here, in_b, shared, self._distances)
            else:
                there = {name: m for name, m in self.in_a.items() if name in recordings[number]}
                replay(self.a, there, in_a, recordings[number], self._distances)
            with other_sums(self.a):
                replay(self.a, self.in_a, in_a, own, self._noise, nudge=nudge)
        for each in self._noise.values():
            each.least = nudge / 2

    def _divergences(self, name: str, gaps: Sequence[TensorGap]) -> Iterator[Divergence]:
        """Yield what is beyond noise: the code before a module; its weights, or its output."""
        if self._is_beyond(name, "input"):
            yield self._divergence(name, "input")
        different = [gap for gap in gaps if gap.different]
        if different:
            yield self._divergence(name, "weights", different)
        elif self._is_beyond(name, "output", max([0.0, *(gap.relative for gap in gaps)])):
            yield self._divergence(name, "output")

    def _is_beyond(self, name: str, part: Part, explained: float = 0.0) -> bool:
        """Return True if a distance is beyond noise, and beyond what rounded weights explain."""
        here, noise = self._distances.get((name, part)), self._noise.get((name, part))
        if here is None or noise is None:
            return False
        if here.strange:
            return not noise.strange
        usual = self._usual.get((_kind(name), part), 0.0)
        ratio = max(
            here.mean / max(noise.mean, explained, usual),
            here.largest / max(noise.largest, noise.least * 2, explained * 2, usual * 4),
        )
        return ratio > FACTOR

    @cached_property
    def _usual(self) -> dict[tuple[str, Part], float]:
        """The usual distance of modules of a kind, over all layers, of quantised models."""
        listed: dict[tuple[str, Part], list[float]] = defaultdict(list)
        for (name, part), distance in self._distances.items():
            listed[_kind(name), part].append(distance.mean)
        if not self.quantised:
            return {}
        return {key: median(values) for key, values in listed.items() if len(values) > 2}

    def _divergence(self, name: str, where: str, gaps: Sequence[TensorGap] = ()) -> Divergence:
        part: Part = "input" if where == "input" else "output"
        here = self._distances.get((name, part), Distance())
        noise = self._noise.get((name, part), Distance()).mean
        cause = "; ".join(sorted(here.strange))
        return Divergence(name, where, here.mean or here.largest, noise, list(gaps), cause)

    def _explained(self, row: Divergence) -> Divergence:
        """Return the divergence with its cause, if its weights differ."""
        if row.where != "weights":
            return row
        a, b = weights_of(self.in_a[row.module]), weights_of(self.in_b[row.module])
        gap = row.tensors[0]
        key = gap.name.removeprefix(f"{row.module}.")
        cause, hint = cause_of(gap, a.get(key), b.get(key), self._others(gap))
        return replace(row, cause=cause, hint=hint)

    def _others(self, gap: TensorGap) -> Weights:
        """Return a's other tensors of the same shape, for a look at mixed-up names."""
        listed: Weights = {}
        room = OTHERS if len(gap.shape) > 1 else 0  # vectors of norms are too much alike
        for name, place in self.in_a.items():
            for own, tensor in place.named_parameters(name, recurse=False):
                same = tensor.shape == gap.shape and own != gap.name
                room -= tensor.numel() if same else 0
                if room > 0 and same:
                    listed[own] = tensor.detach()
        return listed


def _kind(name: str) -> str:
    """Return a module's name without the numbers of layers and experts."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))
