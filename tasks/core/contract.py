"""Contracts: the tensors that an artifact has to contain, and checks with their verdicts.

A contract is a list of `Expected` tensors. It comes from the configuration on the meta device and
never from the artifact that it judges. `judge` compares it with the tensors of the artifact and
returns one `Check` per tensor; `require` raises one `ContractError` that names all failed checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.core.errors import ContractError


@dataclass(frozen=True)
class Expected:
    """A required tensor. `dtype` is a safetensors name ("BF16"); None allows any dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None

    def __str__(self) -> str:
        return describe(self.shape, self.dtype or "any")


@dataclass(frozen=True)
class Bound:
    """A measured distance, such as "mean KL", its unit, and the largest that is allowed."""

    measure: str
    unit: str
    value: float
    limit: float


@dataclass(frozen=True)
class Check:
    """One assertion and its verdict; `hint` is advice, `bound` has the numbers of a distance."""

    name: str
    expected: str
    found: str
    ok: bool
    hint: str = field(default="", compare=False)
    bound: Bound | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain JSON; `Check.read` reads it."""
        text = {"name": self.name, "expected": self.expected, "found": self.found, "ok": self.ok}
        return text if self.bound is None else {**text, "bound": asdict(self.bound)}

    @classmethod
    def read(cls, verdict: Mapping[str, Any]) -> Check:
        """Return the check of a stored verdict."""
        bound = Bound(**verdict["bound"]) if "bound" in verdict else None
        return cls(**{**verdict, "bound": bound})


Z_95 = 1.959964
"""Quantile of the normal distribution for a two-sided interval of 95 %."""


def share_interval(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` samples.

    Wilson (1927), "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    spread = Z_95 * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2))
    centre, scale = share + Z_95**2 / (2 * count), 1 + Z_95**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def describe(shape: Sequence[int], dtype: str) -> str:
    """Return shape and dtype as text: `BF16 [64, 128]`."""
    return f"{dtype} {list(shape)}"


def judge(expected: Iterable[Expected], tensors: Mapping[str, Any]) -> list[Check]:
    """Compare a contract with an artifact's tensors, which have shape and dtype.

    An unexpected tensor is a failed check.
    """
    checks: list[Check] = []
    for want in expected:
        have = tensors.get(want.name)
        if have is None:
            checks.append(Check(want.name, str(want), "missing", ok=False))
        else:
            ok = tuple(have.shape) == want.shape and want.dtype in (None, have.dtype)
            checks.append(Check(want.name, str(want), describe(have.shape, have.dtype), ok=ok))
    for name in sorted(set(tensors) - {check.name for check in checks}):
        text = describe(tensors[name].shape, tensors[name].dtype)
        checks.append(Check(name, "no such tensor", text, ok=False))
    return checks


def require(checks: Iterable[Check], *, stage: str) -> None:
    """Raise one `ContractError` that lists every failed check."""
    failed = [check for check in checks if not check.ok]
    if not failed:
        return
    shown = [f"{c.name}: expected {c.expected}, found {c.found}" for c in failed[:20]]
    if len(failed) > len(shown):
        shown.append(f"... and {len(failed) - len(shown)} more")
    raised = ContractError(
        f"{stage}: contract not met: {len(failed)} failed, first {shown[0]}",
        details=shown,
        hint=next((check.hint for check in failed if check.hint), ""),
    )
    raised.bound = next((asdict(check.bound) for check in failed if check.bound), None)
    raise raised
