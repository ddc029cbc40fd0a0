"""Execute a plan: write every output tensor from its source straight to its final offset.

    done = execute(plan, {"base": base, "adapter": adapter}, out)
    done.checksums["lm_head.weight"]

Workers are threads: reading, hashing, arithmetic and writing all release the interpreter's lock.
Memory is bounded by the number of blocks and workers, whatever the model's size. Results do not
depend on the number of workers: see `compute.py`.

Data that no operation changes never passes through Python: whole files are linked or copied
(`copying.py`), byte ranges are copied by the kernel, and hashes come from the input's manifest.
Without a manifest the data has to be read for its hash, and is written from the same buffer.

A run that was killed leaves its journal (`journal.py`). The next run with the same plan and inputs
keeps the finished tensors and ends with the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.core.disk import write_refused
from tasks.weights.execute.journal import Journal, Outcome, identify
from tasks.weights.execute.running import Run
from tasks.weights.execute.writer import Spec, write_index
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.source import Source
from tasks.weights.plan.layout import lay_out
from tasks.weights.plan.operations import Plan

MAX_WORKERS = 16


@dataclass(frozen=True)
class Executed:
    """Result of executing a plan.

    Attributes:
        outcomes: one per tensor, in the plan's order.
        linked: output files that are an input's file, linked or copied as a whole.
        resumed: number of tensors that an earlier, interrupted run had finished.
        read: bytes of tensor data that this process read; kernel copies are not counted.
        written: bytes of tensor data that this process wrote.
    """

    outcomes: Mapping[str, Outcome]
    linked: Sequence[str] = ()
    resumed: int = 0
    read: int = 0
    written: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain JSON."""
        outcomes = [asdict(outcome) for outcome in self.outcomes.values()]
        return {**vars(self), "outcomes": outcomes, "linked": list(self.linked)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Executed:
        """Read what `as_json` returned."""
        outcomes = {entry["name"]: Outcome(**entry) for entry in raw["outcomes"]}
        return cls(**{**raw, "outcomes": outcomes})

    @property
    def checksums(self) -> dict[str, str]:
        """Hash of every output tensor's bytes, by name."""
        return {name: outcome.checksum for name, outcome in self.outcomes.items()}

    @property
    def changed(self) -> dict[str, float]:
        """Fraction of elements that the adapter changed, for tensors that it touches."""
        return {n: o.changed for n, o in self.outcomes.items() if o.changed is not None}

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN or infinite elements, for tensors that have any."""
        return {n: o.nonfinite for n, o in self.outcomes.items() if o.nonfinite}

    @property
    def quantization_error(self) -> dict[str, float]:
        """`|W - W4|_F / |delta|_F` for tensors that training quantized and the adapter changes."""
        return {
            name: (outcome.error / max(outcome.delta, 1e-30)) ** 0.5
            for name, outcome in self.outcomes.items()
            if outcome.error is not None and outcome.delta is not None
        }

    @property
    def kept(self) -> float | None:
        """Share of the adapter's update that the output keeps; None if nothing was changed."""
        return self._share("kept")

    @property
    def nearest_keeps(self) -> float | None:
        """Share that the sums rounded to nearest would keep; None if nothing was changed."""
        return self._share("nearest")

    @property
    def kept_by_tensor(self) -> dict[str, float]:
        """`kept` of every tensor that the adapter changes."""
        return {
            name: (outcome.kept or 0.0) / outcome.delta
            for name, outcome in self.outcomes.items()
            if outcome.delta
        }

    def _share(self, part: str) -> float | None:
        changed = [outcome for outcome in self.outcomes.values() if outcome.delta]
        total = sum(outcome.delta or 0.0 for outcome in changed)
        return sum(getattr(outcome, part) for outcome in changed) / total if total else None

    @property
    def overall_error(self) -> float | None:
        """`quantization_error` over all tensors together; None if training did not quantize."""
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
    """Execute a plan that `validate` has accepted.

    Args:
        plan: one operation per output tensor.
        sources: inputs by the names that the plan uses.
        out: existing directory; gets the weight files, their index, and the journal, which
            `artifact.publish` reads and removes.
        workers: number of threads; None for the number of cores that this process may use.
        stem: start of the file names: "model" or "adapter_model".
        scan: inspect the values of copied tensors even if their hashes are known.

    Raises:
        ArtifactError: an input cannot be read, or an output cannot be written (disk full). Finished
            tensors and the journal stay for the next run; if there are none, nothing stays.
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
