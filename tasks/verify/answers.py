"""Log-probabilities of a server on the probes of a reference, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import PROFILES, DriftLimit
from tasks.drift.share import TOLERANCE, WIDEST, Share, adapter_share
from tasks.drift.verdict import limit_in
from tasks.verify.alignment import Aligned, align
from tasks.verify.causes import Evidence, Nearby
from tasks.verify.comparison import Distance, distance, format_of
from tasks.verify.reference import Reference
from tasks.verify.servers.scoring import scores
from tasks.verify.servers.server import Scores, Server

COARSEST = 5.0
"""Least effect of an adapter, in units of a 16-bit trainer's noise: its dose is 0.1 off."""
BLURRED = 1.0
"""Bias of the dose at which the base could be the trained model."""
LEAN = 0.25
"""Bias of the dose by the noise of a format, in units of the ratio of noise and adapter."""


class Answers:
    """A server's log-probabilities on the probes of a reference; each name is asked once.

    All checks take one of these, the name that should be the trained model, and the name of its
    base on the same server (None if there is none).

    Args:
        server: the server.
        reference: the trained model.
        profile: "strict", "standard" or "relaxed", or the limits themselves.

    Raises:
        ConfigError: no such profile.
    """

    def __init__(
        self, server: Server, reference: Reference, profile: str | DriftLimit = "standard"
    ) -> None:
        if isinstance(profile, str) and profile not in PROFILES:
            raise ConfigError(f"no profile {profile!r}", hint=f"one of {', '.join(PROFILES)}")
        self.server, self.reference = server, reference
        self.profile = PROFILES[profile] if isinstance(profile, str) else profile
        self._scores: dict[str, list[Scores]] = {}
        self._aligned: dict[str, Aligned] = {}
        self._doses: dict[str, Share | None] = {}

    def scores(self, model: str) -> list[Scores]:
        """Return the log-probabilities of the probes under a name of the server.

        Probes that are longer than the server's context are cut: what is beyond is not measured.

        Raises:
            UnsupportedError: the API does not give any.
            ServerError: the server does not answer, or refuses.
        """
        if model not in self._scores:
            whole = self.reference.sequences
            most = (self.length(model) or max(map(len, whole)) + 1) - 1  # one is generated
            parts = self.server.score(model, [ids[:most] for ids in whole])
            self._scores[model] = [
                scores(len(ids), dict(enumerate(zip(part.ids, part.logprobs, strict=True))))
                for ids, part in zip(whole, parts, strict=True)
            ]
        return self._scores[model]

    def length(self, model: str) -> int | None:
        """Return the context of a name or of its base, in tokens; None if the server says none."""
        served = {entry.name: entry for entry in self.server.models()}
        entry = served.get(model)
        parent = served.get(entry.parent or "") if entry else None
        return next((e.max_length for e in (entry, parent) if e and e.max_length), None)

    def aligned(self, model: str) -> Aligned:
        """Return the same by position and id of the reference."""
        if model not in self._aligned:
            self._aligned[model] = align(self.reference.trained, self.scores(model))
        return self._aligned[model]

    @cached_property
    def limit(self) -> DriftLimit:
        """The profile's limits, widened by the measured noise of the server's format."""
        return limit_in(self.profile, self.reference.trained, self.format)

    @property
    def format(self) -> str:
        """Torch name of the dtype that the server computes in; bfloat16 if nothing tells it."""
        trained = self.reference.trained
        seen = (format_of(trained, served) for served in list(self._aligned.values()))
        return next((dtype for dtype in seen if dtype), "bfloat16")

    @cached_property
    def noise(self) -> float:
        """Effect of an adapter below which its dose cannot be measured (nats).

        A 16-bit trainer's own noise is in both of its prints. It would pull the dose towards one
        half, by the share that it has in their difference.
        """
        trained = self.reference.trained
        if trained.arithmetic == "float32" or trained.arithmetic not in trained.formats:
            return 0.0
        return COARSEST * trained.formats[trained.arithmetic].typical_kl(routed=trained.routed)

    def tolerance(self, measured: Share) -> float:
        """Return how far from 1 the dose of a correct server may be.

        The noise of a format leans towards the adapter's direction: measured on a real model, by up
        to a quarter of their ratio (as standard deviations).
        """
        trained = self.reference.trained
        noise, least = trained.formats.get(self.format), WIDEST if trained.routed else TOLERANCE
        if noise is None:
            return least
        ratio = noise.typical_kl(routed=trained.routed) / measured.signal
        return max(least, LEAN * math.sqrt(ratio))

    def is_whole(self, measured: Share | None) -> bool:
        """Return True if a dose is that of a correct server, or the adapter changes nothing."""
        if measured is None or measured.is_whole:
            return True
        return abs(measured.value - 1) <= min(self.tolerance(measured), BLURRED / 2)

    def distance(self, model: str) -> Distance:
        """Return the distance of a name from the trained model."""
        return distance(self.reference.trained, self.aligned(model), self.limit)

    def from_base(self, model: str) -> Distance | None:
        """Return the distance of a name from the base; None without adapter."""
        base = self.reference.base
        if base is None:
            return None
        return distance(base, self.aligned(model), self.limit, most_likely=False)

    def dose(self, model: str) -> Share | None:
        """Return how much of the adapter a name applies: 0 is the base, 1 the trained model.

        None without an adapter that has an effect, and where too few probes were measured.
        """
        if model not in self._doses:
            self._doses[model] = self._dose(model)
        return self._doses[model]

    def _dose(self, model: str) -> Share | None:
        trained, base, served = self.reference.trained, self.reference.base, self.aligned(model)
        if base is None:
            return None
        measured = adapter_share(trained, base, served.logprobs, served.measured)
        noise = trained.formats.get(self.format)
        if measured is None or noise is None:
            return measured
        usual = noise.typical_kl(routed=trained.routed) / measured.signal
        left = max(0.0, measured.remainder - usual)
        return replace(measured, remainder=left)  # without the noise of a correct server

    def clear_dose(self, model: str) -> Share | None:
        """Return the same; None if the trainer's own noise would pull it towards one half."""
        measured = self.dose(model)
        return measured if measured is not None and measured.signal > self.noise else None

    def from_siblings(self, model: str) -> list[Nearby]:
        """Return the distance of a name from other models whose records lie beside this one."""
        parts, nearby = self.scores(model), []
        for name, other in self.reference.siblings():
            common, trained = self.reference.shared(other)
            aligned = align(trained, [parts[number] for number in common])
            if aligned.measured.any():
                nearby.append(Nearby(name, distance(trained, aligned, self.limit)))
        return nearby

    def evidence(self, model: str, base: str | None) -> Evidence:
        """Return everything that tells the cause of a fault.

        Args:
            model: name that was asked.
            base: name of the base on the same server; None if there is none.
        """
        return Evidence(
            reference=self.reference,
            model=model,
            distance=self.distance(model),
            limit=self.limit,
            dose=self.clear_dose(model),
            from_base=self.from_base(model),
            base=self.from_base(base) if base is not None and base != model else None,
            siblings=self.from_siblings(model),
        )
