"""Results of writing a plan, and the checks and metrics made of them.

Checks use statistics that were counted while the bytes were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from tasks.core.contract import Check
from tasks.core.terminal import command
from tasks.weights.files.names import parse_peft
from tasks.weights.plan import Plan
from tasks.weights.rounding import described

_NAMED = 0.99
"""Below this share the tensors that lost most are named."""


@dataclass
class Written:
    """One written tensor; for the adapter's update D, the base W and the written tensor Q."""

    file: str  # output file that holds it
    checksum: str = ""  # BLAKE3 hash of its bytes
    copied: bool = False  # linked or copied by the kernel, without reading it
    nonfinite: int = 0  # number of NaN or infinite elements; also 0 if the values were not read
    all_zero: bool | None = None  # None if the values were not inspected
    # fraction of elements that the adapter changed; None if it has no terms for the tensor
    changed: float | None = None
    update: float = 0.0  # `<D, D>`
    kept: float = 0.0  # `<Q - W, D>`: `update` if all is kept
    nearest: float = 0.0  # the same for the sum rounded to nearest


@dataclass(frozen=True)
class Executed:
    """Result of executing a plan."""

    tensors: Mapping[str, Written]  # in the plan's order
    linked: Sequence[str] = ()  # output files that are an input's file, linked or copied as a whole
    written: int = 0  # bytes of tensor data that this process wrote; kernel copies do not count

    @property
    def hashes(self) -> dict[tuple[str, str], str]:
        """Hash of every output tensor's bytes, by file and tensor, for `artifact.publish`."""
        return {(each.file, name): each.checksum for name, each in self.tensors.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """Hash of every output tensor's bytes, by name."""
        return {name: each.checksum for name, each in self.tensors.items()}

    @property
    def changed(self) -> dict[str, Written]:
        """The tensors that the adapter changes, by name."""
        return {name: each for name, each in self.tensors.items() if each.changed is not None}

    def kept(self) -> tuple[float, float] | None:
        """Return the shares of the update that the output keeps, and that nearest would keep.

        None if nothing was changed, or elements are not finite, which fails checks of their own.
        """
        changed = self.changed.values()
        update = sum(each.update for each in changed)
        if not update or not isfinite(update):
            return None
        kept = sum(each.kept for each in changed) / update
        return (kept, sum(each.nearest for each in changed) / update) if isfinite(kept) else None


def values_read(plan: Plan, done: Executed) -> list[Check]:
    """Check that all values that were read are finite; tensors copied by their hash are not."""
    checks = []
    for op in plan.ops:
        written = done.tensors[op.name]
        if op.kind == "compute" or written.all_zero is not None:
            check = finite(f"values of {op.name}", written.nonfinite)
            if check.ok and written.changed is not None:
                check = replace(check, found=f"finite, {written.changed:.2%} of elements changed")
            checks.append(check)
    return checks


def finite(name: str, bad: int) -> Check:
    """Check that a tensor has no element that is not finite."""
    hint = f"an input has them, or a sum overflows: {command('audit')} <input> values=true"
    text = f"{bad} elements not finite" if bad else "finite"
    return Check(name, "finite", text, ok=not bad, hint=hint)


def gathered(plan: Plan, done: Executed) -> list[Check]:
    """Check the tensors gathered from partitions: finite, and not every lora_B is all zero."""
    checks = values_read(plan, done)
    keys = {op.name: parse_peft(op.name) for op in plan.ops}
    halves = [name for name, key in keys.items() if key is not None and key.half == "B"]
    if halves:
        # LoRA initialises B with zeros: one stays so if its module saw no data.
        zero = sum(bool(done.tensors[name].all_zero) for name in halves)
        text = f"{zero} of {len(halves)} all zero"
        checks.append(Check("trained lora_B", "not all of them zero", text, zero < len(halves)))
    return checks


def unchanged(done: Executed) -> str:
    """Return a warning about tensors that the adapter names and leaves as they are; "" for none."""
    same = [name for name, each in done.changed.items() if each.changed == 0]
    if not same:
        return ""
    return (
        f"{len(same)} of {len(done.changed)} tensors of the adapter keep the base's values, first "
        f"{same[0]}: their update is zero, or rounds away"
    )


def rounding_kept(
    plan: Plan, done: Executed, least: float
) -> tuple[list[Check], dict[str, float], dict[str, Any]]:
    """Return a check, metrics and notes of what rounding kept of the update; empty if unchanged.

    Unbiased rounding keeps it on average, so only its random part is reported; the recomputed rows
    prove it. `least` is the share of the update that rounding to nearest has to keep.
    """
    shares = done.kept()
    if shares is None:
        return [], {}, {}
    kept, nearest = shares
    unbiased = any(op.unbiased for op in plan.ops)
    text = f"{kept:.1%}" + (f"; nearest would keep {nearest:.1%}" if unbiased else "")
    if kept < _NAMED:
        by_tensor = {n: each.kept / each.update for n, each in done.changed.items() if each.update}
        worst = sorted(by_tensor.items(), key=lambda item: item[1])[:3]
        text += "; least " + ", ".join(f"{name} {share:.1%}" for name, share in worst)
    hint = (
        f"rounding threw {1 - kept:.0%} of the adapter away: merge.rounding=unbiased keeps it in "
        "the same format; or convert.dtype=float32"
    )
    ok = unbiased or kept >= least
    check = Check("kept of the update", f">= {least:.0%}", text, ok=ok, hint=hint)
    numbers = {"kept": kept, "nearest_would_keep": nearest}
    how = described("unbiased" if unbiased else "nearest")
    notes = {"rounding": how | {name: round(share, 5) for name, share in numbers.items()}}
    return [check], numbers, notes
