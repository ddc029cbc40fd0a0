"""register: the gate, and the version that a model registry points at.

The gate holds the conditions under which a run may be registered. Everything measured by a stage's
contract held already, or the flow would have ended there; what is left to ask is whether training
was worth it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tasks.core.errors import ContractError
from tasks.pipeline.artifact import Artifact


class Registry(Protocol):
    """Where versions are written; `tasks/pipeline/tracking.py` is the one that exists."""

    def register(self, model_name: str, served: Artifact, tags: Mapping[str, str]) -> str: ...


@dataclass(frozen=True)
class Gate:
    """Outcome of the gate: whether it holds and, if not, why not."""

    passed: bool
    reasons: tuple[str, ...] = ()


def judge_gate(metrics: Mapping[str, float], *, min_eval_gain: float | None) -> Gate:
    """Decide on a finished run.

    Args:
        metrics: of smoke_eval; `eval/before` and `eval/after` are exact-match shares in [0, 1].
        min_eval_gain: percentage points that exact-match has to rise; None asks for nothing.
    """
    if min_eval_gain is None:
        return Gate(passed=True)
    if "eval/before" not in metrics or "eval/after" not in metrics:
        return Gate(False, ("gate.min_eval_gain is set, but exact-match was not measured",))
    # Rounded: 0.7 - 0.5 is a hair below 0.2, and a gate of 20 points means 20 points.
    gain = round(100 * (metrics["eval/after"] - metrics["eval/before"]), 6)
    if gain >= min_eval_gain:
        return Gate(passed=True)
    return Gate(False, (f"exact-match rose by {gain:.1f} points, gate asks {min_eval_gain:g}",))


def register(
    registry: Registry, *, served: Artifact, gate: Gate, model_name: str, tags: Mapping[str, str]
) -> str:
    """Write the model version and move alias `candidate` to it.

    Returns:
        the version, as `models:/name/version`.

    Raises:
        ContractError: the gate does not hold; nothing was registered.
    """
    if not gate.passed:
        raise ContractError(
            f"register: the gate does not hold: {gate.reasons[0]}",
            details=gate.reasons,
            hint="look at the report, or lower gate.min_eval_gain",
        )
    return registry.register(model_name, served, tags)
