"""What a stage function hands back to the mechanism in `tasks/pipeline/stage.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.contract import Check
from tasks.drift.verdict import Moved


@dataclass(frozen=True)
class StageReport:
    """Result of one stage function, before anything was published.

    Attributes:
        kind: kind of the artifact in the stage's `out` directory (base, dataset, shards, adapter,
            weights, served, report).
        checks: every assertion made, with its verdict. One failed check refuses the artifact.
        metrics: numbers for the tracker.
        notes: what the manifest should remember: plain JSON.
        drift: distance from the trained model, where the stage measured one.
    """

    kind: str
    checks: tuple[Check, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    drift: Moved | None = None
