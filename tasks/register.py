"""register: register the served model as a model version.

`candidate` is the version trained last, whatever the gate (`tasks/release/gate.py`) says. A model
that passed it may become `champion`.
"""

from __future__ import annotations

from tasks.core.errors import ContractError
from tasks.release.gate import Gate
from tasks.tracking.mlflow_server import Registered, RegisteredModel
from tasks.tracking.tracker import Tracker


def register(
    tracker: Tracker, model: RegisteredModel, gate: Gate, *, promote: bool = False
) -> Registered:
    """Write a model version; with `promote` it becomes `champion` if the gate has passed."""
    return tracker.register(model, promote=promote and gate.passed)


def require_passed(gate: Gate) -> None:
    """Raise ContractError if the gate has not passed."""
    if not gate.passed:
        raise ContractError(
            f"register: the gate does not hold: {gate.reasons[0]}",
            details=gate.reasons,
            hint="look at the report, or change gate.conditions or gate.min_eval_gain",
        )
