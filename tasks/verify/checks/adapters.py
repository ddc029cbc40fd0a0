"""Check that an adapter is applied whole, and that its base stays the base.

An adapter that moves the model by less than a profile allows passes the comparison of
distributions when it is not applied at all; its dose does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.core.terminal import typed
from tasks.drift.share import TOLERANCE, Share
from tasks.verify.answers import BLURRED, Answers
from tasks.verify.causes import causes
from tasks.verify.check import Cause, Check
from tasks.verify.reference import Reference
from tasks.verify.servers.server import UnsupportedError

NAME = "adapter"
BASE = "base"


def applied(answers: Answers, model: str, base: str | None) -> Check:
    """Check that a name applies the whole adapter, by how far it is from the base.

    Args:
        answers: log-probabilities of the server.
        model: name of the adapter, or of a model that it was merged into.
        base: name of the base on the same server; None if there is none.

    Raises:
        ServerError: the server does not answer, or refuses.
    """
    if answers.reference.base is None:
        return Check(NAME, "unknown", "the record has no base: not the record of an adapter")
    try:
        measured = answers.dose(model)
    except UnsupportedError as error:
        return Check(NAME, "unknown", f"no log-probabilities to compare: {error.message}")
    if measured is None:
        text = "the adapter changes none of the probes: no server can show that it is applied"
        return Check(NAME, "unknown", text)
    numbers = _numbers(measured)
    tolerance = answers.tolerance(measured)
    if measured.signal <= answers.noise:
        text = (
            f"the adapter moves the model by {measured.signal:.1e} nats, as little as the "
            f"trainer's rounding ({answers.noise:.1e}): rows of the training data can tell"
        )
        return Check(NAME, "unknown", text, numbers)
    if tolerance > BLURRED:
        text = (
            f"{measured.text} of the adapter answers, which moves these probes by "
            f"{measured.signal:.1e} nats, far below the noise of {answers.format}: a record with "
            "rows of the training data (plumbline-witness) or smoke.texts=<them> can tell"
        )
        return Check(NAME, "unknown", text, numbers)
    if not answers.is_whole(measured):
        likely = causes(answers.evidence(model, base))
        text = f"{measured.text} of the adapter answers under {model!r}, expected 1"
        return Check(NAME, "fault", text, numbers, {"dose": 1.0}, likely)
    if not measured.is_certain:
        text = f"{measured.text} of the adapter answers: too uncertain to tell 1 from 0.5"
        return Check(NAME, "unknown", text, numbers, {"dose": 1.0})
    least = 1 - max(min(tolerance, BLURRED / 2), measured.high - measured.low)
    text = (
        f"{measured.text} of the adapter answers under {model!r}; less than {least:.2f} would have "
        "been seen"
    )
    return Check(NAME, "ok", text, numbers, {"dose": 1.0})


def _numbers(measured: Share) -> dict[str, float | str]:
    return {
        "dose": measured.value,
        "dose_low": measured.low,
        "dose_high": measured.high,
        "remainder": measured.remainder,
        "adapter_kl": measured.signal,
    }


def base_name(answers: Answers, model: str, base: str | None) -> Check:
    """Check that the base's own name answers as the base, with no part of the adapter.

    Takes the arguments of `applied`, and raises the same errors.
    """
    if answers.reference.base is None:
        return Check(BASE, "unknown", "the record has no base: not the record of an adapter")
    if base is None or base == model:
        return Check(BASE, "unknown", "the server has no name for the base: nothing to ask")
    try:
        measured, leaked = answers.from_base(base), answers.clear_dose(base)
    except UnsupportedError as error:
        return Check(BASE, "unknown", f"no log-probabilities to compare: {error.message}")
    assert measured is not None
    limit = answers.limit
    numbers: dict[str, float | str] = {"mean_kl": measured.mean_kl, "p95_kl": measured.p95_kl}
    limits = {"mean_kl": limit.mean_kl, "p95_kl": limit.p95_kl}
    leaks = leaked is not None and leaked.low > 0 and leaked.value > TOLERANCE
    if leaked is not None:
        numbers["dose"] = leaked.value
        limits["dose"] = 0.0
    if leaks:
        assert leaked is not None
        text = f"{leaked.text} of the adapter answers under the base's name {base!r}, expected 0"
        cause = Cause(
            "lora-leak",
            f"requests for {base!r} are answered with the adapter: it is merged into the base, or "
            "leaks into its requests",
            "serve the base's own folder under its name; serve adapter and base from two servers "
            "until the engine is fixed (vLLM #42008, #49063)",
        )
        return Check(BASE, "fault", text, numbers, limits, (cause,))
    if measured.mean_kl > limit.mean_kl or measured.p95_kl > limit.p95_kl:
        text = (
            f"{base!r} is not the base of the training: mean KL {measured.mean_kl:.1e} nats per "
            f"token (limit {limit.mean_kl:.1e})"
        )
        return Check(BASE, "fault", text, numbers, limits, (_other_base(answers.reference, base),))
    text = f"{base!r} answers as the base of the training: mean KL {measured.mean_kl:.1e}"
    return Check(BASE, "ok", text, numbers, limits)


def _other_base(reference: Reference, base: str) -> Cause:
    stored = reference.facts.get("base")
    name = stored.get("name", "") if isinstance(stored, Mapping) else ""
    if reference.quantization not in ("", "none"):
        return Cause(
            "nf4-on-16-bit",
            f"the adapter was trained on a base in {reference.quantization}; {base!r} is stored in "
            "another way",
            "merge into the dequantized base: python flows/deliver.py "
            f"{typed('source', reference.folder)} base=<the base> "
            "out=<a new folder>; or serve it quantised as in training",
        )
    return Cause(
        "other-base",
        f"{base!r} is another model, or another revision, than the one that was trained",
        f"serve the base of the record: {name or 'its name was not recorded'}",
    )
