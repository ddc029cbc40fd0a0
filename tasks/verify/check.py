"""One verdict of verify: what was measured, its limits, and the likely causes of a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "fault", "unknown"]


@dataclass(frozen=True)
class Cause:
    """Likely cause of a fault.

    Attributes:
        code: name for programs, e.g. `base-served`; see "What each fault looks like" in
            docs/verify.md.
        text: the cause and the numbers that speak for it, one sentence.
        hint: what to type, or what to change on the server.
    """

    code: str
    text: str
    hint: str


@dataclass(frozen=True)
class Check:
    """Result of one check of a running server.

    Attributes:
        name: name of the check, e.g. `distribution`.
        verdict: "ok"; "fault"; or "unknown" if the server's API could not prove it, which never
            counts as ok.
        text: one sentence for a person; for "unknown", the reason.
        measured: numbers and names by key, e.g. `mean_kl` in nats.
        limit: the limit of each measured number that has one, by the same key.
        causes: likely causes of a fault, the likeliest first.
    """

    name: str
    verdict: Verdict
    text: str
    measured: Mapping[str, float | str] = field(default_factory=dict)
    limit: Mapping[str, float] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
