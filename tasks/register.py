"""register: apply the gate, sign the served model, and register a model version.

The gate has the conditions for registering a run. The contracts of all stages are met by then, or
the flow would have ended; the gate decides whether training has improved the model enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.core.errors import ContractError
from tasks.pipeline.report import Registered, RegisteredModel
from tasks.pipeline.signature import require_signed, sign


class Registry(Protocol):
    """A model registry; `Tracker` in `tasks/tracking/tracker.py` is one."""

    def register(self, model: RegisteredModel) -> Registered:
        """Write a version, and move the alias `candidate` to the version trained last."""


@dataclass(frozen=True)
class Gate:
    """Outcome of the gate, with reasons if it has not passed."""

    passed: bool
    reasons: tuple[str, ...] = ()


def judge_gate(metrics: Mapping[str, float], *, min_eval_gain: float | None) -> Gate:
    """Apply the gate to a finished run.

    Args:
        metrics: metrics of smoke_eval; `eval/before` and `eval/after` are exact-match shares in
            [0, 1].
        min_eval_gain: least rise of exact match in percentage points; None for no condition.
    """
    if min_eval_gain is None:
        return Gate(passed=True)
    if "eval/before" not in metrics or "eval/after" not in metrics:
        return Gate(False, ("gate.min_eval_gain is set, but exact-match was not measured",))
    # Rounded, because 0.7 - 0.5 is slightly less than 0.2 in floating point.
    gain = round(100 * (metrics["eval/after"] - metrics["eval/before"]), 6)
    if gain >= min_eval_gain:
        return Gate(passed=True)
    return Gate(False, (f"exact-match rose by {gain:.1f} points, gate asks {min_eval_gain:g}",))


def register(
    registry: Registry,
    model: RegisteredModel,
    gate: Gate,
    *,
    private_key: Path | None = None,
    public_key: Path | None = None,
) -> Registered:
    """Sign the served model and write a model version. `candidate` is the version trained last.

    Args:
        registry: the model registry.
        model: the served model.
        gate: outcome of the gate.
        private_key: key that signs the folder (`register.sign`); None leaves it unsigned.
        public_key: key that has to have signed it (`register.verify`); None for any or none.

    Raises:
        ContractError: the gate has not passed; nothing is signed or registered.
        ArtifactError: the folder is not, byte for byte, what the key signed.
    """
    if not gate.passed:
        raise ContractError(
            f"register: the gate does not hold: {gate.reasons[0]}",
            details=gate.reasons,
            hint="look at the report, or lower gate.min_eval_gain",
        )
    if private_key is not None:
        sign(model.served.path, private_key)
    if public_key is not None:
        require_signed(model.served.path, public_key)
    return registry.register(model)
