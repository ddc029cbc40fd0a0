"""register: sign the served model, and register a model version.

`candidate` is the version trained last, whatever the gate (`tasks/release/gate.py`) says. A model
that passed it may become `champion`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tasks.core.errors import ContractError
from tasks.pipeline.report import Registered, RegisteredModel
from tasks.pipeline.signature import require_signed, sign
from tasks.release.gate import Gate
from tasks.tracking.mlflow_registry import Version


class Registry(Protocol):
    """A model registry; `Tracker` in `tasks/tracking/tracker.py` is one."""

    def champion(self, name: str) -> Version | None:
        """Return the version of a model that the alias `champion` names; None for none."""

    def register(self, model: RegisteredModel, *, promote: bool = False) -> Registered:
        """Write a version, and move the alias `candidate` to the version trained last."""


def register(
    registry: Registry,
    model: RegisteredModel,
    gate: Gate,
    *,
    private_key: Path | None = None,
    public_key: Path | None = None,
    promote: bool = False,
) -> Registered:
    """Sign the served model and write a model version. `candidate` is the version trained last.

    Args:
        private_key: key that signs the folder (`register.sign`); None leaves it unsigned.
        public_key: key that has to have signed it (`register.verify`); None for any or none.
        promote: True to let `champion` name the version, if the gate has passed.

    Raises:
        ArtifactError: the folder is not, byte for byte, what the key signed.
    """
    if private_key is not None and gate.passed:
        sign(model.served.path, private_key)
    if public_key is not None:
        require_signed(model.served.path, public_key)
    return registry.register(model, promote=promote and gate.passed)


def require_passed(gate: Gate) -> None:
    """Raise ContractError if the gate has not passed."""
    if not gate.passed:
        raise ContractError(
            f"register: the gate does not hold: {gate.reasons[0]}",
            details=gate.reasons,
            hint="look at the report, or change gate.conditions or gate.min_eval_gain",
        )
