"""Check that a name of a server gives the trained model's log-probabilities."""

from __future__ import annotations

from tasks.verify.answers import Answers
from tasks.verify.causes import causes
from tasks.verify.check import Check
from tasks.verify.comparison import FEWEST
from tasks.verify.power import power
from tasks.verify.servers.server import UnsupportedError

NAME = "distribution"


def distribution(answers: Answers, model: str, base: str | None) -> Check:
    """Compare a server's log-probabilities with those of the trained model.

    Args:
        answers: log-probabilities of the server.
        model: name that should be the trained model.
        base: name of the base of an adapter on the same server; None if there is none.

    Raises:
        ServerError: the server does not answer, or refuses.
    """
    try:
        served = answers.aligned(model)
    except UnsupportedError as error:
        return Check(NAME, "unknown", f"no log-probabilities to compare: {error.message}")
    positions = int(served.measured.sum())
    if positions < FEWEST:
        text = f"the server gave log-probabilities of {positions} positions; {FEWEST} are needed"
        return Check(NAME, "unknown", text, {"positions": float(positions)})
    measured, limit = answers.distance(model), answers.limit
    seen = power(answers.reference.trained, served, limit)
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
    source = f"; {limit.measured}" if limit.measured else ""
    amount = f"mean KL {measured.mean_kl:.1e} nats per token (limit {limit.mean_kl:.1e}{source})"
    if not measured.exceeds(limit):
        within = "" if answers.is_whole(answers.dose(model)) else "within the limit of "
        text = f"{within}the trained model's log-probabilities at {positions} positions: {amount}; "
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
