"""register: register the served model as a model version.

`candidate` is the version trained last, whatever the gate (`tasks/release/gate.py`) says. A model
that passed it may become `champion`.
"""

from __future__ import annotations

from typing import Protocol

from tasks.core.errors import ContractError
from tasks.pipeline.report import Registered, RegisteredModel
from tasks.release.gate import Gate
from tasks.tracking.mlflow_server import Version


class Registry(Protocol):
    """A model registry; `Tracker` in `tasks/tracking/tracker.py` is one."""

    def champion(self, name: str) -> Version | None:
        """Return the version of a model that the alias `champion` names; None for none."""

    def register(self, model: RegisteredModel, *, promote: bool = False) -> Registered:
        """Write a version, and move the alias `candidate` to the version trained last."""


def register(
    registry: Registry, model: RegisteredModel, gate: Gate, *, promote: bool = False
) -> Registered:
    """Write a model version; with `promote` it becomes `champion` if the gate has passed."""
    return registry.register(model, promote=promote and gate.passed)


def require_passed(gate: Gate) -> None:
    """Raise ContractError if the gate has not passed."""
    if not gate.passed:
        raise ContractError(
            f"register: the gate does not hold: {gate.reasons[0]}",
            details=gate.reasons,
            hint="look at the report, or change gate.conditions or gate.min_eval_gain",
        )
