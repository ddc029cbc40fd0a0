"""Types around a stage: its report, its result, and what the model registry gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.core.contract import Check
from tasks.drift.verdict import Moved

if TYPE_CHECKING:
    from tasks.pipeline.artifact import Artifact


@dataclass(frozen=True)
class StageReport:
    """Result of one stage function, before anything is published."""

    kind: str
    checks: tuple[Check, ...] = ()  # every assertion; a failed one refuses the artifact
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)  # plain JSON for the manifest
    drift: Moved | None = None  # distance from the trained model; None if not measured
    # Of tensors, by file and tensor, that are known from their writing
    hashes: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageResult:
    """Result of one finished stage; its name is `<step>.<stage>` if the run has several steps."""

    name: str
    artifact: Artifact
    reused: bool
    seconds: float
    checks: tuple[Check, ...]
    drift: dict[str, float] | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class RegisteredModel:
    """A served model for the registry; `trained_at` is ISO 8601 with an offset, `card` Markdown."""

    name: str
    served: Artifact
    trained_at: str
    tags: Mapping[str, str] = field(default_factory=dict)
    card: str = ""


@dataclass(frozen=True)
class Registered:
    """A version in the registry as `models:/name/version`, and those that two aliases name.

    `candidate` is the version that was trained last; `champion` is empty if that was not moved.
    """

    version: str
    candidate: str
    champion: str = ""
