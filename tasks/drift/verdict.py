"""Compare fingerprints of both kinds: log-probabilities of language models, reward scores.

Training writes one of the two; every hand-off is compared with it. Besides, the share of an adapter
that answers is estimated: 0 is the base, 1 the trained model.

Scaling an adapter by a shifts each logit by about a times its change in training. So, at every
position, log p_served - log p_base is regressed on log p_trained - log p_base over the ids,
weighted by probability. Both differences are centred per position, which removes the normalisation.
Noise of the engine is independent of the adapter's direction, so the share is found where the KL of
base and trained model is far below the KL of that noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import Bound, Check
from tasks.core.errors import ArtifactError, DriftError
from tasks.drift.fingerprint import (
    PROFILES,
    Drift,
    DriftLimit,
    Fingerprint,
    RewardDrift,
    ScorePrint,
    contexts,
    drift,
    score_drift,
)
from tasks.witness.plumbline_witness.prints import BASE, FINGERPRINT, SCORES

NAMES = (FINGERPRINT, SCORES)
DECIDED = 0.5
"""Largest half of an interval's width that tells a trained model from its base."""
ROUNDED = 0.75
"""Largest distance from 1 that the rounding of a light adapter explains; the base has 1."""
LOUD = 0.25
"""KL of a merged from the trained model, in units of the base's, from which a warning says so."""
FORMAT_FACTOR = 3.0
"""Allowed drift of a correct engine, in units of the noise of the format that it computes in."""

KERNEL = (
    "the training engine computes another model than these weights are: a fused kernel, or numbers "
    "that overflow; model.attn_implementation=eager or model.dtype=float32, and train again"
)

Print = Fingerprint | ScorePrint
Moved = Drift | RewardDrift


def print_in(folder: Path) -> Path:
    """Return the path of a folder's fingerprint. Raises ArtifactError if there is none."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        raise ArtifactError(f"{folder}: no {FINGERPRINT} and no {SCORES}")
    return path


def load_print(path: Path) -> Print:
    """Read a fingerprint of either kind. Raises ArtifactError if it cannot be read."""
    return ScorePrint.load(path) if path.name == SCORES else Fingerprint.load(path)


def moved(reference: Print, new: Print, dtype: str | None = None) -> Moved:
    """Return the drift of `new` from `reference`. Raises DriftError if they are not comparable.

    `dtype` is the format (torch name) in which the new model is or will be computed: tokens that it
    cannot tell apart are a tie.
    """
    if isinstance(reference, ScorePrint) and isinstance(new, ScorePrint):
        return score_drift(reference, new)
    if isinstance(reference, Fingerprint) and isinstance(new, Fingerprint):
        return drift(reference, new, dtype)
    raise DriftError("log-probabilities and scores are not comparable")


def same_arithmetic(reference: Print, new: Print) -> bool:
    """Return False if the two are known to be measured on different hardware or software."""
    machines = reference.measured_on, new.measured_on
    return None in machines or machines[0] == machines[1]


def limit_in(profile: DriftLimit, reference: Print, dtype: str) -> DriftLimit:
    """Return the limits for a model that is computed in a dtype: the one rule of all comparisons.

    They are those of the profile, or `FORMAT_FACTOR` times the noise that this format has for this
    model, if that is more. float32 has none, but for a mixture of experts: its routers tie by the
    rounding of the weights. A format that was not measured has none.
    """
    if isinstance(reference, ScorePrint):
        return profile
    limit = replace(profile, by_median=reference.routed)
    # Where float32 did not fit, both sides have the noise of the reference's own format.
    noise = reference.formats.get(dtype) or reference.formats.get(reference.arithmetic)
    if noise is None and reference.routed:  # weights are rounded, too: as many routers tie
        noise = max(reference.formats.values(), key=lambda each: each.p95_kl, default=None)
        dtype = "16 bits"
    if noise is None:
        return limit
    kl = FORMAT_FACTOR * noise.typical_kl(routed=reference.routed)
    widened = replace(
        limit,
        mean_kl=max(limit.mean_kl, kl),
        p95_kl=max(limit.p95_kl, FORMAT_FACTOR * noise.p95_kl),
        top1_agreement=min(limit.top1_agreement, 1 - FORMAT_FACTOR * (1 - noise.top1_agreement)),
    )
    text = f"{FORMAT_FACTOR:g} x the noise of {dtype}"
    return limit if widened == limit else replace(widened, measured=text)


def limit_of_scores(live: ScorePrint, new: ScorePrint, limit: DriftLimit) -> DriftLimit:
    """Return the limits for scores of the same weights on other hardware: never stricter."""
    noise = FORMAT_FACTOR * max(live.noise or 0.0, new.noise or 0.0)
    difference = max(limit.difference, noise / score_drift(live, new).unit)
    order = min(limit.order, PROFILES["standard"].order)
    return replace(limit, difference=difference, order=order)


def verdict(
    drifted: Moved,
    limit: DriftLimit,
    noise: float | None = None,
    *,
    name: str = "drift from the trained model",
    cause: str = "",
) -> Check:
    """Return the verdict on a drift as one check.

    The mean drift must stay within twice the repeat noise of the reference engine, if it is given.
    """
    mean, tail, *others = terms = drifted.terms(limit, noise)
    allowed = ", ".join(f"{term.name} {term.sign} {term.limit:.3g}" for term in terms)
    # The bound is that of the mean; that of the tail if the mean is within its limits.
    mean = mean._replace(limit=min([mean.limit, *(t.limit for t in others if t.sign == "<=")]))
    chosen = tail if tail.is_beyond and tail.sign == "<=" and not mean.is_beyond else mean
    unit = "std of scores" if isinstance(drifted, RewardDrift) else "nats per token"
    hint = "; ".join(filter(None, (cause, _wider_profile(drifted) if noise is None else "")))
    return Check(
        name,
        f"{allowed} ({limit.measured})" if limit.measured else allowed,
        str(drifted),
        ok=not any(term.is_beyond for term in terms),
        hint=hint,
        bound=Bound(chosen.name, unit, chosen.value, chosen.limit),
    )


NORMAL = 2.576
"""Half of the interval's width in standard errors, of a normal variable: 99 %."""
TOLERANCE = 0.1
"""A share this close to 1 is no fault: engines round the product of two matrices differently."""
WIDEST = 0.25
"""Half of an interval's width above which nothing can be said: 0.5 could be 1."""
FEWEST_PROBES = 4
LEAN = 0.25
"""Bias of a share by the noise of a format, in units of the ratio of noise and adapter."""
STEADY = 4.0
"""Effect of an adapter of a mixture of experts at a position, in medians, above which it chose
other experts there: near a tie of the router, rounding alone chooses the base's again."""


@dataclass(frozen=True)
class Share:
    """Estimated share of an adapter, with an interval by its spread over probes."""

    value: float  # 0 for the base, 1 for the trained model, 0.5 for half of its scale
    low: float
    high: float
    # share of the adapter's effect that the line does not explain; 0 for the base, any scaled
    # adapter and the trained model
    remainder: float
    signal: float  # size of the adapter's effect at the returned ids, half its variance (nats)

    @property
    def is_whole(self) -> bool:
        """True if the interval, or the tolerance around 1, holds 1."""
        return self.low <= 1 <= self.high or abs(self.value - 1) <= TOLERANCE

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    @property
    def is_certain(self) -> bool:
        """True if the interval is narrow enough to tell a whole adapter from half of it."""
        return self.half_width <= WIDEST

    @property
    def text(self) -> str:
        """The estimate for a person."""
        return f"{self.value:z.2f} ({self.low:z.2f} to {self.high:z.2f})"


def tolerance(share: Share, trained: Fingerprint, dtype: str) -> float:
    """Return how far from 1 the share of a right model may be that is computed in a dtype.

    The noise of a format leans towards the adapter's direction: measured on a real model, by up
    to a quarter of their ratio (as standard deviations).
    """
    least = WIDEST if trained.routed else TOLERANCE  # routers tie
    return max(least, LEAN * math.sqrt(noise_of(trained, dtype) / share.signal))


def deviation(share: Share, trained: Fingerprint, dtype: str) -> float:
    """Return how far from 1 a share is no fault: within `tolerance`, and never the base's."""
    return min(tolerance(share, trained, dtype), DECIDED)


def noise_of(trained: Fingerprint, dtype: str) -> float:
    """Return the noise of a format for a model (nats); 0 if it was not measured."""
    noise = trained.formats.get(dtype)
    return noise.typical_kl(routed=trained.routed) if noise else 0.0


def adapter_share(
    trained: Fingerprint, base: Fingerprint, served: NDArray[Any], measured: NDArray[np.bool_]
) -> Share | None:
    """Return the share of the adapter in the log-probabilities `served` of an engine, (N, K).

    They are NaN where it returned none; `measured` (N,) is True at the positions that it answered.
    None if too few probes were measured, or the adapter has no effect.
    """
    p = (np.exp(trained.logprobs.astype(np.float64)) + np.exp(base.logprobs)) / 2
    # Probes that begin alike repeat the same noise.
    fresh: NDArray[Any] = np.zeros(len(trained.logprobs), bool)
    fresh[np.unique(contexts(trained.probes), return_index=True)[1]] = True
    weights = np.where(np.isnan(served) | ~fresh[:, None], 0.0, p)
    measured = measured & fresh
    moved = _centred(trained.logprobs, base.logprobs, weights)
    seen = _centred(served, base.logprobs, weights)
    products = np.stack(
        [(weights * a * b).sum(1) for a, b in ((moved, moved), (moved, seen), (seen, seen))], 1
    )
    owner: NDArray[Any] = np.repeat(
        np.arange(len(trained.probes)), [len(probe) - 1 for probe in trained.probes]
    )
    if trained.routed and measured.any():
        measured &= products[:, 0] <= STEADY * np.median(products[measured, 0])
        products[~measured] = 0.0
    sums = np.zeros((len(trained.probes), 3))
    np.add.at(sums, owner, products)
    sums = sums[np.bincount(owner, weights=measured, minlength=len(sums)) > 0]
    square, product, other = sums.sum(0)
    signal = float(square / 2 / max(measured.sum(), 1))
    if len(sums) < FEWEST_PROBES or signal <= 1e-9:
        return None
    value = product / square
    # By the ratio's standard error over probes; Student's t of so few is wider than the normal.
    count = len(sums)
    error = float(np.sqrt(((sums[:, 1] - value * sums[:, 0]) ** 2).sum()) / square)
    half = NORMAL * np.sqrt(count / (count - 1)) * (1 + 2.4 / (count - 1)) * error
    remainder = max(0.0, other - 2 * value * product + value**2 * square) / square
    low, high = float(value - half), float(value + half)
    return Share(float(value), low, high, float(remainder), signal)


def _centred(above: NDArray[Any], below: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """Return the difference of two log-probabilities less its weighted mean by position."""
    difference = np.where(weights > 0, np.nan_to_num(above.astype(np.float64)) - below, 0.0)
    mass = np.maximum(weights.sum(1, keepdims=True), 1e-300)
    centred: NDArray[Any] = difference - (weights * difference).sum(1, keepdims=True) / mass
    return centred


def share_checks(
    reference: Path, new: Print, limit: DriftLimit, dtype: str, *, rounded: bool = False
) -> tuple[Check, ...]:
    """Check the share of the adapter that answers: where it is light, no KL tells it from its base.

    Without the base's fingerprint beside the reference there is nothing to check. `dtype` is the
    format (torch name) that `new` is computed in. `rounded` is True for weights of a merge: what
    rounding adds to a light adapter is the same in all probes, so the interval, which is by their
    spread, does not have it.
    """
    path = reference.with_name(BASE)
    if not path.is_file() or not isinstance(new, Fingerprint):
        return ()
    measured = ~np.isnan(new.logprobs).all(1)
    trained, base = Fingerprint.load(reference), Fingerprint.load(path)
    share = adapter_share(trained, base, new.logprobs, measured)
    allowed = limit.share
    if share is not None:
        allowed = max(allowed, deviation(share, trained, dtype))
        if rounded:
            # Measured with SmolLM2, an adapter below the rounding noise, bf16: 0.05 to 0.4 of it.
            allowed = max(allowed, min(share.remainder**0.5, ROUNDED))
    if share is None:
        text, ok = "not measured: too few probes, or no effect on them", True
    elif share.half_width > DECIDED:
        text, ok = f"{share.text}: not decided, smoke.texts=<what it was trained on>", True
    else:
        text, ok = share.text, share.is_whole or abs(share.value - 1) <= allowed
    return (
        Check(
            "share of the adapter that answers",
            f"1 within {allowed:.2g}, or its interval holds 1",
            text,
            ok=ok,
            hint="the base answers, the adapter at another scale, or rounding took it away",
        ),
    )


def rounding_warning(reference: Path, merged: Moved | None) -> str:
    """Return a warning if rounding moved the answers much of the way that training did, or ""."""
    base = reference / BASE
    if not isinstance(merged, Drift) or not base.is_file():
        return ""
    trained = Fingerprint.load(reference / FINGERPRINT)
    learned = drift(trained, Fingerprint.load(base)).mean_kl
    share = merged.mean_kl / learned if learned else 0.0
    if share < LOUD:
        return ""
    return (
        f"KL of the merged from the trained model is {share:.0%} of the base's: the adapter is "
        "lighter than the noise of rounding; convert.dtype=float16 has finer steps, float32 none"
    )


def engine_verdict(
    exact: Fingerprint,
    live: Fingerprint,
    profile: DriftLimit,
    own: Fingerprint,
    cause: str = KERNEL,
) -> tuple[Moved, Check]:
    """Compare a training engine with the same weights in float32. Returns drift and verdict.

    `own` is by transformers in the engine's dtype, base and adapter apart as there: a sum with a
    rounded product loses what is below half a step, which no merged model does.
    """
    dtype = own.arithmetic
    noise = {} if dtype == "float32" else {dtype: drift(exact, own, dtype).noise}
    drifted, limit = (
        moved(exact, live, dtype),
        limit_in(profile, replace(exact, formats=noise), dtype),
    )
    return drifted, verdict(drifted, limit, name="the training engine in float32", cause=cause)


def _wider_profile(drifted: Moved) -> str:
    """Return the strictest profile that allows a drift, and how to choose it."""
    for name, limit in PROFILES.items():
        if not drifted.beyond(limit):
            return (
                f"the {name} profile admits it, if you accept the difference: "
                f"gate={name} (flows/deliver.py: smoke.profile={name})"
            )
    return "no profile admits it: this is another model than the one that was trained"
