"""Running a plan: every output tensor from its source straight to its final offset.

    done = execute(plan, {"base": base, "adapter": adapter}, out)
    done.sha256["lm_head.weight"]

Workers are threads: reading, hashing, arithmetic and writing all release the interpreter's lock.
Each has a few tensors in hand, the longest first, and makes a block of every one in turn, so that
their hashes run in the lanes of a vector (`lanes.py`, `hashing.py`). Memory is bounded by blocks,
lanes and workers, whatever the model's size. Results do not depend on the number of workers: see
`blocks.py`.

What no operation touches never passes through Python: whole files are linked (`copying.py`), ranges
are copied by the kernel, and their hashes are taken from the input's manifest. Without a manifest
they have to be read for the hash anyway, and are written from the same buffer.

A run that was killed leaves its journal (`journal.py`); the next one with the same plan and the
same inputs keeps what is finished, and gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.weights.execute.journal import Journal, Outcome, identify
from tasks.weights.execute.running import Run
from tasks.weights.execute.writer import Spec, write_index
from tasks.weights.files.file_ranges import write_refused
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.source import Source
from tasks.weights.plan.layout import lay_out
from tasks.weights.plan.operations import Plan

MAX_WORKERS = 16


@dataclass(frozen=True)
class Executed:
    """What running a plan left and found.

    Attributes:
        outcomes: one a tensor, in the plan's order.
        linked: output files that are links to an input's.
        resumed: how many tensors an earlier, interrupted run had finished.
        read: bytes of tensor data that this process has read; kernel copies are not counted.
        written: bytes of tensor data that it has written.
    """

    outcomes: Mapping[str, Outcome]
    linked: Sequence[str] = ()
    resumed: int = 0
    read: int = 0
    written: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        outcomes = [asdict(one) for one in self.outcomes.values()]
        return {**vars(self), "outcomes": outcomes, "linked": list(self.linked)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Executed:
        """What `as_json` made."""
        outcomes = {one["name"]: Outcome(**one) for one in raw["outcomes"]}
        return cls(**{**raw, "outcomes": outcomes})

    @property
    def sha256(self) -> dict[str, str]:
        """Of every output tensor."""
        return {name: one.sha256 for name, one in self.outcomes.items()}

    @property
    def changed(self) -> dict[str, float]:
        """Fraction of elements that terms changed, by tensor that has terms."""
        return {n: o.changed for n, o in self.outcomes.items() if o.changed is not None}

    @property
    def nonfinite(self) -> dict[str, int]:
        """NaN or infinite elements, by tensor; only tensors that have any."""
        return {n: o.nonfinite for n, o in self.outcomes.items() if o.nonfinite}

    @property
    def quantization_error(self) -> dict[str, float]:
        """`|W - W4|_F / |delta|_F` by tensor that training quantised and terms change."""
        return {
            name: (one.error / max(one.delta, 1e-30)) ** 0.5
            for name, one in self.outcomes.items()
            if one.error is not None and one.delta is not None
        }

    @property
    def overall_error(self) -> float | None:
        """The same over all of them together; None without quantisation."""
        both = [
            (o.error, o.delta)
            for o in self.outcomes.values()
            if o.error is not None and o.delta is not None
        ]
        delta = sum(d for _, d in both)
        return (sum(e for e, _ in both) / delta) ** 0.5 if delta > 0 else None


def execute(
    plan: Plan,
    sources: Mapping[str, Source],
    out: Path,
    *,
    workers: int | None = None,
    stem: str = WEIGHTS,
    scan: bool = False,
) -> Executed:
    """Execute a plan that `validate` has passed.

    Args:
        plan: what to do.
        sources: inputs by the names that the plan uses.
        out: existing directory; gets the weight files, their index, and the journal, which
            `artifact.publish` reads and removes.
        workers: threads; None for as many as this process may use cores.
        stem: "model", or "adapter_model".
        scan: look at the values of copied tensors too, even where no hash has to be taken.

    Raises:
        ArtifactError: an input that cannot be read, an output that cannot be written (full disk).
            The folder is then as it was, unless some tensors are finished: those stay, with the
            journal, for the next run.
    """
    files = lay_out(plan, sources, stem=stem)
    journal = Journal(out, identify(plan, sources, stem))
    run = Run(sources, out, files, journal, scan)
    try:
        run.to_end(workers or _cores())
    except BaseException:
        if not journal.entries:
            journal.remove()
            run.remove_files()
        raise
    if len(files) > 1:
        places = {op.name: file.name for file in files for op in file.ops}
        specs = [Spec(op.name, op.shape, op.dtype) for op in plan.ops]
        try:
            write_index(out, specs, places, stem)
        except OSError as error:
            raise write_refused(out, error) from error
    ordered = {op.name: run.outcomes[op.name] for op in plan.ops}
    journal.begin(ordered.values())
    linked = [file.name for file in files if file.link is not None]
    return Executed(ordered, linked, run.resumed, run.read, run.written)


def _cores() -> int:
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
