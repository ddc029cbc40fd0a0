"""Fingerprints of either kind: log-probabilities of a language model, scores of a reward model.

Training leaves one of the two, and every hand-off is compared with it.
"""

from __future__ import annotations

from pathlib import Path

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError, DriftError
from tasks.drift.fingerprint import PROFILES, Drift, DriftLimit, Fingerprint, drift, within
from tasks.drift.reward_drift import RewardDrift, RewardLimit, exceeds
from tasks.drift.reward_scores import SCORES, ScorePrint, score_drift

FINGERPRINT = "fingerprint.fp"
NAMES = (FINGERPRINT, SCORES)
NOISE_FACTOR = 4.0
"""Mean drift between two kinds of hardware, at most, over the larger repeat noise of the two.
Measured between two kinds of CPU kernels it is 0.4, from bf16 to fp32 0.8."""
TAIL = 5.0
"""95th percentile of a KL over its mean, as in all drift profiles."""

Print = Fingerprint | ScorePrint
Moved = Drift | RewardDrift


def print_in(folder: Path) -> Path:
    """The file that says what a folder's model does. Raises ArtifactError when there is none."""
    found = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if found is None:
        raise ArtifactError(f"{folder}: no {FINGERPRINT} and no {SCORES}")
    return found


def load_print(path: Path) -> Print:
    """Read it. Raises ArtifactError."""
    return ScorePrint.load(path) if path.name == SCORES else Fingerprint.load(path)


def moved(reference: Print, new: Print) -> Moved:
    """How far `new` lies from `reference`. Raises DriftError when they cannot be compared."""
    if isinstance(reference, ScorePrint) and isinstance(new, ScorePrint):
        return score_drift(reference, new)
    if isinstance(reference, Fingerprint) and isinstance(new, Fingerprint):
        return drift(reference, new)
    raise DriftError("log-probabilities and scores are not comparable")


def same_arithmetic(reference: Print, new: Print) -> bool:
    """Return False if the two are known to be measured on different hardware or software."""
    told = reference.measured_on, new.measured_on
    return None in told or told[0] == told[1]


def by_noise(limit: DriftLimit, found: Moved, *noises: float | None) -> DriftLimit:
    """Widen a limit to what rounding explains where the order of sums is another one.

    Args:
        limit: for equal arithmetic; it stays the least that is admitted.
        found: the drift, which has the unit of scores.
        noises: of either side, as `Fingerprint.noise` or `ScorePrint.noise`.
    """
    noise = max((one for one in noises if one is not None), default=0.0)
    unit = found.unit if isinstance(found, RewardDrift) else 1.0
    other = PROFILES["standard"]  # its agreement: near ties turn over
    return DriftLimit(
        mean_kl=max(limit.mean_kl, NOISE_FACTOR * noise),
        p95_kl=max(limit.p95_kl, TAIL * NOISE_FACTOR * noise),
        top1_agreement=min(limit.top1_agreement, other.top1_agreement),
        rewards=RewardLimit(
            difference=max(limit.rewards.difference, NOISE_FACTOR * noise / unit),
            order=min(limit.rewards.order, other.rewards.order),
        ),
    )


def too_far(found: Moved, limit: DriftLimit, noise: float | None = None) -> list[str]:
    """What of it is beyond the limit; empty when it holds."""
    if isinstance(found, RewardDrift):
        return exceeds(found, limit.rewards, noise)
    return within(found, limit, noise)


def allowed(found: Moved, limit: DriftLimit) -> str:
    """The limit in words."""
    if isinstance(found, RewardDrift):
        return (
            f"mean difference <= {limit.rewards.difference:g} standard deviations of the "
            f"reference's scores, pairs in the same order >= {limit.rewards.order:g}"
        )
    return (
        f"mean KL <= {limit.mean_kl:.0e}, p95 KL <= {limit.p95_kl:.0e}, "
        f"top-1 agreement >= {limit.top1_agreement}"
    )


def told(found: Moved) -> str:
    """The distance in words."""
    if isinstance(found, RewardDrift):
        return (
            f"mean difference {found.mean_difference:.2e} (at most {found.max_difference:.2e}) of "
            f"{found.unit:.3g}, {found.same_order:.4f} of the pairs in the same order"
        )
    return (
        f"mean KL {found.mean_kl:.2e}, p95 KL {found.p95_kl:.2e}, "
        f"top-1 agreement {found.top1_agreement:.4f}"
    )


def verdict(
    found: Moved,
    limit: DriftLimit,
    noise: float | None = None,
    *,
    name: str = "drift from the trained model",
    cause: str = "",
) -> Check:
    """Return the verdict on a drift as one check.

    Args:
        found: the drift.
        limit: its limits.
        noise: the reference engine's repeat noise, where the drift must not exceed it.
        name: of the check.
        cause: the likeliest cause and what to type, for the hint of a failure.
    """
    expected = allowed(found, limit)
    if noise is not None:
        expected += f", on average <= twice the repeat noise {noise:.2e}"
    exceeded = too_far(found, limit, noise)
    hint = "; ".join(filter(None, (cause, _admitted_by(found) if noise is None else "")))
    return Check(name, expected, told(found), ok=not exceeded, hint=hint)


def _admitted_by(found: Moved) -> str:
    """The strictest profile that admits a drift, and how to ask for it."""
    for name, limit in PROFILES.items():
        if not too_far(found, limit):
            return (
                f"the {name} profile admits it, if you accept the difference: "
                f"gate={name} (flows/deliver.py: smoke.profile={name})"
            )
    return "no profile admits it: this is another model than the one that was trained"
