"""Check that a name of a server gives the trained model's log-probabilities."""

from __future__ import annotations

from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import PROFILES, DriftLimit
from tasks.drift.verdict import NOISE_FACTOR
from tasks.verify.alignment import Aligned, align
from tasks.verify.causes import Evidence, Nearby, causes
from tasks.verify.check import Check
from tasks.verify.comparison import (
    FEWEST,
    Distance,
    distance,
    is_coarse,
    limit_of,
    rounding_kl,
)  # fmt: skip
from tasks.verify.dose import Dose, dose
from tasks.verify.power import power
from tasks.verify.reference import Reference
from tasks.verify.servers.server import Scores, Server, UnsupportedError

NAME = "distribution"
COARSEST = 10.0
"""Least effect of an adapter, in units of the trainer's rounding: its dose is off by up to 0.1."""


class Answers:
    """A server's log-probabilities on the probes of a reference; each name is asked once.

    Args:
        server: the server.
        reference: the trained model.
        profile: "strict", "standard" or "relaxed".
    """

    def __init__(self, server: Server, reference: Reference, profile: str = "standard") -> None:
        if profile not in PROFILES:
            raise ConfigError(f"no profile {profile!r}", hint=f"one of {', '.join(PROFILES)}")
        self.server, self.reference = server, reference
        self.profile = PROFILES[profile]
        self._scores: dict[str, list[Scores]] = {}

    def scores(self, model: str) -> list[Scores]:
        """Return the log-probabilities of the probes under a name of the server.

        Raises:
            UnsupportedError: the API does not give any.
            ServerError: the server does not answer, or refuses.
        """
        if model not in self._scores:
            self._scores[model] = self.server.score(model, self.reference.sequences)
        return self._scores[model]

    def aligned(self, model: str) -> Aligned:
        """Return the same by position and id of the reference."""
        return align(self.reference.trained, self.scores(model))

    @property
    def limit(self) -> DriftLimit:
        """The profile's limits, widened by rounding and by the witness's own noise."""
        return limit_of(self.reference.trained, self.profile, self.reference.trained.noise)

    @property
    def noise(self) -> float:
        """Effect of an adapter below which its dose cannot be measured (nats).

        A trainer's own rounding is in both of its prints. It would pull the dose towards one half,
        by the share that it has in their difference.
        """
        trained = self.reference.trained
        coarse = COARSEST * rounding_kl(trained) if is_coarse(trained) else 0.0
        return max(1e-5, NOISE_FACTOR * (trained.noise or 0.0), coarse)

    def distance(self, model: str) -> Distance:
        """Return the distance of a name from the trained model."""
        return distance(self.reference.trained, self.aligned(model), self.limit)

    def from_base(self, model: str) -> Distance | None:
        """Return the distance of a name from the base; None without adapter."""
        base = self.reference.base
        if base is None:
            return None
        return distance(base, self.aligned(model), self.limit, most_likely=False)

    def dose(self, model: str) -> Dose | None:
        """Return how much of the adapter a name applies; None if that cannot be measured."""
        base = self.reference.base
        if base is None:
            return None
        return dose(self.reference.trained, base, self.aligned(model), self.noise)

    def from_siblings(self, model: str) -> list[Nearby]:
        """Return the distance of a name from other models whose records lie beside this one."""
        scores, nearby = self.scores(model), []
        for name, other in self.reference.siblings():
            common, trained = self.reference.shared(other)
            aligned = align(trained, [scores[number] for number in common])
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
            dose=self.dose(model),
            from_base=self.from_base(model),
            base=self.from_base(base) if base is not None and base != model else None,
            siblings=self.from_siblings(model),
        )


def distribution(
    server: Server,
    model: str,
    base: str | None,
    reference: Reference,
    *,
    profile: str = "standard",
    answers: Answers | None = None,
) -> Check:
    """Compare a server's log-probabilities with those of the trained model.

    Args:
        server: the server.
        model: name that should be the trained model.
        base: name of the base of an adapter on the same server; None if there is none.
        reference: the trained model.
        profile: limits, "strict", "standard" or "relaxed".
        answers: what was asked before, so that nothing is asked twice.

    Raises:
        ServerError: the server does not answer, or refuses.
        ConfigError: no such profile.
    """
    answers = answers or Answers(server, reference, profile)
    try:
        served = answers.aligned(model)
    except UnsupportedError as error:
        return Check(NAME, "unknown", f"no log-probabilities to compare: {error.message}")
    positions = int(served.measured.sum())
    if positions < FEWEST:
        text = f"the server gave log-probabilities of {positions} positions; {FEWEST} are needed"
        return Check(NAME, "unknown", text, {"positions": float(positions)})
    measured, limit = answers.distance(model), answers.limit
    seen = power(reference.trained, served, limit)
    numbers: dict[str, float | str] = {
        "mean_kl": measured.mean_kl,
        "p95_kl": measured.p95_kl,
        "max_kl": measured.max_kl,
        "top1_agreement": measured.top1_agreement,
        "positions": float(positions),
        "seen_with_99_percent": seen.smallest,
    }
    limits = {
        "mean_kl": limit.mean_kl,
        "p95_kl": limit.p95_kl,
        "top1_agreement": limit.top1_agreement,
    }
    amount = f"mean KL {measured.mean_kl:.1e} nats per token (limit {limit.mean_kl:.1e})"
    if not measured.exceeds(limit):
        text = f"the trained model's log-probabilities at {positions} positions: {amount}; "
        return Check(NAME, "ok", text + seen.text, numbers, limits)
    evidence = answers.evidence(model, base)
    numbers |= {"first_kl": measured.first_kl, "growth": measured.growth}
    if evidence.dose is not None:
        numbers |= {"dose": evidence.dose.value, "remainder": evidence.dose.remainder}
    if evidence.base is not None:
        numbers["base_kl"] = evidence.base.mean_kl
    text = (
        f"not the trained model's log-probabilities: {amount}, p95 KL {measured.p95_kl:.1e}, "
        f"top-1 agreement {measured.top1_agreement:.3f}"
    )
    return Check(NAME, "fault", text, numbers, limits, causes(evidence))
