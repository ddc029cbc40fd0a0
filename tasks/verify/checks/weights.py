"""Check that a name gives the trained model's log-probabilities, with the whole of an adapter.

An adapter that moves the model by less than a profile allows passes the comparison of
distributions when it is not applied at all; its dose does not.
"""

from __future__ import annotations

from tasks.core.report import Cause, Row
from tasks.core.terminal import typed
from tasks.drift.share import TOLERANCE
from tasks.verify.asked import BLURRED, Asked
from tasks.verify.causes import causes
from tasks.verify.compare import FEWEST
from tasks.verify.servers.server import ServerError

MOST = 16
"""Most other names of a server that are asked."""


def distribution(asked: Asked) -> Row:
    """Compare a server's log-probabilities with those of the trained model.

    If they are others, the model is looked for under the server's other names.
    """
    name, model = "distribution", asked.model
    positions = int(asked.aligned(model).measured.sum())
    if positions < FEWEST:
        text = f"the server gave log-probabilities of {positions} positions; {FEWEST} are needed"
        return Row(name, "unknown", text, {"positions": float(positions)})
    measured, limit, dose = asked.distance(model), asked.limit, asked.dose(model)
    numbers: dict[str, float | str] = {
        "mean_kl": measured.mean_kl,
        "p95_kl": measured.p95_kl,
        "max_kl": measured.max_kl,
        "top1_agreement": measured.top1_agreement,
        "positions": float(positions),
        "mass": measured.mass,
    }
    if dose is not None:
        numbers |= {"dose": dose.value, "remainder": dose.remainder}
    limits = {key: getattr(limit, key) for key in ("mean_kl", "p95_kl", "top1_agreement")}
    source = f"; {limit.measured}" if limit.measured else ""
    amount = (
        f"mean KL {measured.mean_kl:.1e} nats per token (limit {limit.mean_kl:.1e}{source}) over "
        f"{measured.mass:.0%} of the probability mass"
    )
    is_within = not measured.beyond(limit)
    if is_within and asked.is_whole(dose):
        text = f"the trained model's log-probabilities at {positions} positions: {amount}"
        return Row(name, "ok", text, numbers, limit=limits)
    swapped = _swapped(asked)
    if is_within:
        part = f"{dose.text} of the adapter answers" if dose else ""
        text = f"within the limit of the trained model at {positions} positions, but {part}: "
        return Row(name, "fault" if swapped else "ok", text + amount, numbers, swapped, limits)
    numbers |= {"first_kl": measured.first_kl, "growth": measured.growth}
    text = (
        f"not the trained model's log-probabilities: {amount}, p95 KL {measured.p95_kl:.1e}, "
        f"top-1 agreement {measured.top1_agreement:.3f}"
    )
    return Row(name, "fault", text, numbers, (*swapped, *causes(asked)), limits)


def _swapped(asked: Asked) -> tuple[Cause, ...]:
    """Return the cause of another name of the server that answers as the trained model."""
    names = [entry.name for entry in asked.server.models()]
    for other in [name for name in names if name not in (asked.model, asked.base)][:MOST]:
        try:
            is_trained = asked.is_trained(other)
        except ServerError as error:
            if error.code not in ("model", "missing", "length", "request"):
                raise
            continue  # this name does not take our probes, so that it is another model
        if is_trained:
            return (
                Cause(
                    "adapters-swapped",
                    f"{other!r} answers as the model that {asked.model!r} should be "
                    f"(mean KL {asked.distance(other).mean_kl:.1e})",
                    f"--lora-modules {asked.model}={asked.reference.folder}, and the folder of "
                    f"{other!r} under its own name",
                ),
            )
    return ()


def adapter(asked: Asked) -> Row:
    """Check that a name applies the whole adapter, by how far it is from the base."""
    name, model = "adapter", asked.model
    measured = asked.dose(model)
    if measured is None:
        text = "the adapter changes none of the probes: no server can show that it is applied"
        return Row(name, "unknown", text)
    numbers: dict[str, float | str] = {
        "dose": measured.value,
        "dose_low": measured.low,
        "dose_high": measured.high,
        "remainder": measured.remainder,
        "adapter_kl": measured.signal,
    }
    limits, tolerance = {"dose": 1.0}, asked.tolerance(measured)
    if measured.signal <= asked.noise:
        text = (
            f"the adapter moves the model by {measured.signal:.1e} nats, as little as the "
            f"trainer's rounding ({asked.noise:.1e}): rows of the training data can tell"
        )
        return Row(name, "unknown", text, numbers)
    if tolerance > BLURRED:
        text = (
            f"{measured.text} of the adapter answers, which moves these probes by "
            f"{measured.signal:.1e} nats, far below the noise of {asked.format}: a record with "
            "rows of the training data (plumbline-witness) or smoke.texts=<them> can tell"
        )
        return Row(name, "unknown", text, numbers)
    if not asked.is_whole(measured):
        text = f"{measured.text} of the adapter answers under {model!r}, expected 1"
        return Row(name, "fault", text, numbers, causes(asked), limits)
    if not measured.is_certain:
        text = f"{measured.text} of the adapter answers: too uncertain to tell 1 from 0.5"
        return Row(name, "unknown", text, numbers, limit=limits)
    least = 1 - max(min(tolerance, BLURRED / 2), measured.high - measured.low)
    text = (
        f"{measured.text} of the adapter answers under {model!r}; less than {least:.2f} would have "
        "been seen"
    )
    return Row(name, "ok", text, numbers, limit=limits)


def base(asked: Asked) -> Row:
    """Check that the base's own name answers as the base, with no part of the adapter."""
    name, own = "base", asked.base
    if own is None or own == asked.model:
        return Row(name, "unknown", "the server has no name for the base: nothing to ask")
    limit, measured, leaked = asked.limit, asked.from_base(own), asked.clear_dose(own)
    assert measured is not None
    numbers: dict[str, float | str] = {"mean_kl": measured.mean_kl, "p95_kl": measured.p95_kl}
    limits = {"mean_kl": limit.mean_kl, "p95_kl": limit.p95_kl}
    if leaked is not None:
        numbers["dose"] = leaked.value
        limits["dose"] = 0.0
        if leaked.low > 0 and leaked.value > TOLERANCE:
            text = f"{leaked.text} of the adapter answers under the base's name {own!r}, expected 0"
            cause = Cause(
                "lora-leak",
                f"requests for {own!r} are answered with the adapter: it is merged into the base, "
                "or leaks into its requests",
                "serve the base's own folder under its name; serve adapter and base from two "
                "servers until the engine is fixed (vLLM #42008, #49063)",
            )
            return Row(name, "fault", text, numbers, (cause,), limits)
    if measured.mean_kl > limit.mean_kl or measured.p95_kl > limit.p95_kl:
        text = (
            f"{own!r} is not the base of the training: mean KL {measured.mean_kl:.1e} nats per "
            f"token (limit {limit.mean_kl:.1e})"
        )
        return Row(name, "fault", text, numbers, (_other_base(asked, own),), limits)
    text = f"{own!r} answers as the base of the training: mean KL {measured.mean_kl:.1e}"
    return Row(name, "ok", text, numbers, limit=limits)


def _other_base(asked: Asked, own: str) -> Cause:
    reference = asked.reference
    if reference.quantization not in ("", "none"):
        return Cause(
            "nf4-on-16-bit",
            f"the adapter was trained on a base in {reference.quantization}; {own!r} is stored in "
            "another way",
            "merge into the dequantized base: python flows/deliver.py "
            f"{typed('source', reference.folder)} base=<the base> "
            "out=<a new folder>; or serve it quantised as in training",
        )
    stored = reference.facts.get("base")
    recorded = stored.get("name", "") if isinstance(stored, dict) else ""
    return Cause(
        "other-base",
        f"{own!r} is another model, or another revision, than the one that was trained",
        f"serve the base of the record: {recorded or 'its name was not recorded'}",
    )
