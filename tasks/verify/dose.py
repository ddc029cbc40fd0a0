"""Estimate how much of an adapter a server applies: 0 is the base, 1 the trained model."""

from __future__ import annotations

from tasks.drift.fingerprint import Fingerprint
from tasks.drift.share import Share, adapter_share
from tasks.verify.alignment import Aligned

Dose = Share


def dose(trained: Fingerprint, base: Fingerprint, served: Aligned, noise: float) -> Dose | None:
    """Return the dose of the adapter in a server's answers.

    Args:
        trained: fingerprint of the trained model.
        base: the same without the adapter, at the same ids.
        served: the server's answers, aligned with `trained`.
        noise: mean KL that rounding alone causes (nats). An adapter that moves the model by less
            cannot be measured.

    Returns:
        None if too few probes were measured, or the adapter's effect is not above the noise.
    """
    estimated = adapter_share(trained, base, served.logprobs, served.measured)
    return None if estimated is None or estimated.signal <= noise else estimated
