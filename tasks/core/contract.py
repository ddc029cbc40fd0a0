"""Contracts: what an artifact must contain, and the verdicts on what it does contain.

A contract is a list of `Expected` tensors, made from configuration on the meta device, never from
the artifact it judges. `judge` compares it with the tensors found and gives one `Check` a tensor;
`require` turns failed checks into one `ContractError` that names all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tasks.core.errors import ContractError


@dataclass(frozen=True)
class Expected:
    """One tensor that must be there. `dtype` is a safetensors name ("BF16"); None admits any."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None

    def __str__(self) -> str:
        return describe(self.shape, self.dtype or "any")


@dataclass(frozen=True)
class Check:
    """One assertion and its verdict.

    Attributes:
        name: of the tensor or property.
        expected: the condition.
        found: the value.
        ok: True if the value meets the condition.
        hint: what to look at and what to type if it does not; not part of the stored verdict.
    """

    name: str
    expected: str
    found: str
    ok: bool
    hint: str = field(default="", compare=False)

    def as_dict(self) -> dict[str, str | bool]:
        """The verdict as plain JSON; `Check(**verdict)` reads it."""
        return {"name": self.name, "expected": self.expected, "found": self.found, "ok": self.ok}


class TensorLike(Protocol):
    """What a contract needs to know of a tensor: a header entry is enough."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def describe(shape: Sequence[int], dtype: str) -> str:
    """`BF16 [64, 128]`."""
    return f"{dtype} {list(shape)}"


def judge(expected: Iterable[Expected], found: Mapping[str, TensorLike]) -> list[Check]:
    """Compare a contract with the tensors found.

    Every expected tensor is looked up once; every found tensor that nobody expects is a failed
    check too, so leftovers cannot pass.
    """
    checks: list[Check] = []
    wanted: set[str] = set()
    for want in expected:
        wanted.add(want.name)
        have = found.get(want.name)
        if have is None:
            checks.append(Check(want.name, str(want), "missing", ok=False))
            continue
        same_shape = tuple(have.shape) == want.shape
        same_dtype = want.dtype is None or have.dtype == want.dtype
        found_text = describe(have.shape, have.dtype)
        checks.append(Check(want.name, str(want), found_text, ok=same_shape and same_dtype))
    for name in sorted(set(found) - wanted):
        have = found[name]
        checks.append(Check(name, "no such tensor", describe(have.shape, have.dtype), ok=False))
    return checks


def require(checks: Iterable[Check], *, stage: str, hint: str = "") -> None:
    """Raise one `ContractError` that lists every failed check.

    Args:
        checks: the verdicts.
        stage: whose they are.
        hint: of the error; "" takes that of the first failed check that has one.
    """
    failed = [check for check in checks if not check.ok]
    if not failed:
        return
    shown = [f"{c.name}: expected {c.expected}, found {c.found}" for c in failed[:20]]
    if len(failed) > len(shown):
        shown.append(f"... and {len(failed) - len(shown)} more")
    first = failed[0]
    raise ContractError(
        f"{stage}: contract not met: {len(failed)} failed, first {first.name}: "
        f"expected {first.expected}, found {first.found}",
        details=shown,
        hint=hint or next((check.hint for check in failed if check.hint), ""),
    )
