"""The one argument of all checks: a server, a name on it, a reference, and their comparison."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from tasks.drift.fingerprint import PROFILES, DriftLimit
from tasks.drift.share import Share, adapter_share, noise_of, tolerance
from tasks.drift.verdict import limit_in
from tasks.verify.compare import Aligned, Distance, align, distance, format_of
from tasks.verify.reference import Reference
from tasks.verify.servers.server import EMPTY, SAMPLED, Scores, Server, UnsupportedError, score

COARSEST = 5.0
"""Least effect of an adapter, in units of a 16-bit trainer's noise: its dose is 0.1 off."""
BLURRED = 1.0
"""Bias of the dose at which the base could be the trained model."""


class Asked:
    """A server that is compared with a reference; each name is asked once.

    `model` and `base` are names on the server: what should be the trained model, and its base.
    `positions` are measured of a probe where each costs a request.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        base: str | None,
        reference: Reference,
        profile: DriftLimit = PROFILES["standard"],
        *,
        positions: int = SAMPLED,
    ) -> None:
        self.server, self.reference = server, reference
        self.model, self.base, self.profile = model, base, profile
        self._positions = positions
        self._scores: dict[str, list[Scores]] = {}
        self._aligned: dict[str, Aligned] = {}

    @cached_property
    def is_slow(self) -> bool:
        """True if each scored position costs a request."""
        try:
            self.server.score(self.model, [])
        except UnsupportedError:
            return True
        return False

    def length(self, model: str) -> int | None:
        """Return the context of a name or of its base, in tokens; None if the server says none."""
        served = {entry.name: entry for entry in self.server.models()}
        entry = served.get(model)
        parent = served.get(entry.parent or "") if entry else None
        return next((each.max_length for each in (entry, parent) if each and each.max_length), None)

    def scores(self, model: str) -> list[Scores]:
        """Return the log-probabilities of the probes under a name of the server.

        Probes that are longer than the server's context are cut: what is beyond is not measured.
        """
        if model not in self._scores:
            whole = self.reference.sequences
            most = (self.length(model) or max(map(len, whole)) + 1) - 1  # one is generated
            parts = score(self.server, model, [ids[:most] for ids in whole], most=self._positions)
            self._scores[model] = [
                [*part, *[EMPTY] * (len(ids) - 1 - len(part))]
                for ids, part in zip(whole, parts, strict=True)
            ]
        return self._scores[model]

    def aligned(self, model: str) -> Aligned:
        """Return the log-probabilities by position and id of the reference."""
        if model not in self._aligned:
            self._aligned[model] = align(self.reference.trained, self.scores(model))
        return self._aligned[model]

    @property
    def format(self) -> str:
        """Torch name of the dtype that the server computes in; bfloat16 if nothing tells it."""
        seen = (format_of(self.reference.trained, each) for each in list(self._aligned.values()))
        return next((dtype for dtype in seen if dtype), "bfloat16")

    @cached_property
    def limit(self) -> DriftLimit:
        """The profile's limits, widened by the measured noise of the server's format."""
        return limit_in(self.profile, self.reference.trained, self.format)

    @cached_property
    def noise(self) -> float:
        """Effect of an adapter below which its dose cannot be measured (nats).

        A 16-bit trainer's own noise is in both of its prints. It would pull the dose towards one
        half, by the share that it has in their difference.
        """
        trained = self.reference.trained
        dtype = trained.arithmetic
        return 0.0 if dtype == "float32" else COARSEST * noise_of(trained, dtype)

    def distance(self, model: str) -> Distance:
        """Return the distance of a name from the trained model."""
        return distance(self.reference.trained, self.aligned(model), self.limit)

    def from_base(self, model: str | None) -> Distance | None:
        """Return the distance of a name from the base; None without adapter, or without a name."""
        base = self.reference.base
        if base is None or model is None:
            return None
        return distance(base, self.aligned(model), self.limit)

    def from_siblings(self, model: str) -> dict[str, float]:
        """Return the mean KL of a name from other models whose records lie beside this one."""
        parts, nearby = self.scores(model), {}
        for name, other in self.reference.siblings():
            common, trained = self.reference.shared(other)
            aligned = align(trained, [parts[number] for number in common])
            if aligned.measured.any():
                nearby[name] = distance(trained, aligned, self.limit).mean_kl
        return nearby

    def dose(self, model: str) -> Share | None:
        """Return how much of the adapter a name applies: 0 is the base, 1 the trained model.

        None without adapter, or if it changes none of the probes.
        """
        trained, base, served = self.reference.trained, self.reference.base, self.aligned(model)
        if base is None:
            return None
        measured = adapter_share(trained, base, served.logprobs, served.measured)
        if measured is None:
            return None
        usual = noise_of(trained, self.format) / measured.signal  # of a correct server
        return replace(measured, remainder=max(0.0, measured.remainder - usual))

    def clear_dose(self, model: str) -> Share | None:
        """Return the same; None if the trainer's own noise would pull it towards one half."""
        measured = self.dose(model)
        return measured if measured is not None and measured.signal > self.noise else None

    def tolerance(self, measured: Share) -> float:
        """Return how far from 1 the dose of a correct server may be."""
        return tolerance(measured, self.reference.trained, self.format)

    def is_whole(self, measured: Share | None) -> bool:
        """Return True if a dose is that of a correct server, or the adapter changes nothing."""
        if measured is None or measured.is_whole:
            return True
        return abs(measured.value - 1) <= min(self.tolerance(measured), BLURRED / 2)

    def is_trained(self, model: str) -> bool:
        """Return True if a name answers as the trained model, with the whole of an adapter."""
        return not self.distance(model).beyond(self.limit) and self.is_whole(self.dose(model))
