"""Results of writing: of one tensor, while it is computed and at its end, and of a whole plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Result of one finished tensor."""

    name: str
    file: str  # output file that holds it
    checksum: str  # BLAKE3 hash of its bytes
    nonfinite: int = 0  # number of NaN or infinite elements; also 0 if the values were not read
    # True if every element is zero; None if the values were not inspected
    all_zero: bool | None = None
    # fraction of elements that the adapter changed; None if it has no terms for it
    changed: float | None = None
    # squared Frobenius norm of the 4-bit quantization error; None if training did not quantize
    # the tensor
    error: float | None = None
    # squared Frobenius norm of the adapter's change D; None like `changed`
    delta: float | None = None
    # `<Q - W, D>` of the base W and the written tensor Q: `delta` if all is kept
    kept: float | None = None
    nearest: float | None = None  # the same for the sum rounded to nearest


@dataclass
class Measured:
    """Statistics of a tensor while it is computed; as in `Outcome`, but `changed` is a count."""

    nonfinite: int = 0
    changed: int = 0
    error: float | None = None
    delta: float = 0.0
    kept: float = 0.0
    nearest: float = 0.0


@dataclass(frozen=True)
class Executed:
    """Result of executing a plan."""

    outcomes: Mapping[str, Outcome]  # one per tensor, in the plan's order
    linked: Sequence[str] = ()  # output files that are an input's file, linked or copied as a whole
    read: int = 0  # bytes of tensor data that this process read; kernel copies are not counted
    written: int = 0  # bytes of tensor data that this process wrote

    @property
    def hashes(self) -> dict[tuple[str, str], str]:
        """Hash of every output tensor's bytes, by file and tensor, for `artifact.publish`."""
        return {(o.file, name): o.checksum for name, o in self.outcomes.items()}

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
