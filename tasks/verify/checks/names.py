"""Look for the trained model under the other names of a server, if it is not under its own."""

from __future__ import annotations

from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.servers.server import ServerError

NAME = "names"
MOST = 16
"""Most names that are asked."""


def names(answers: Answers, model: str, base: str | None) -> Check:
    """Check that no other name answers as the trained model while this one does not."""
    if _is_trained(answers, model):
        return Check(NAME, "ok", f"{model} itself is the trained model")
    others = [e.name for e in answers.server.models() if e.name not in (model, base)][:MOST]
    if not others:
        return Check(NAME, "ok", "the server has no other name to mix it up with")
    measured: dict[str, float | str] = {"names": len(others)}
    for other in others:
        try:
            is_trained, moved = _is_trained(answers, other), answers.distance(other)
        except ServerError as error:
            if error.code not in ("model", "length", "request"):
                raise
            continue  # this name does not take our probes, so that it is another model
        if is_trained:
            text = f"the trained model answers under another name: {other}"
            cause = Cause(
                "adapters-swapped",
                f"{other!r} answers as the model that {model!r} should be "
                f"(mean KL {moved.mean_kl:.1e})",
                f"--lora-modules {model}={answers.reference.folder}, and the folder of {other!r} "
                "under its own name",
            )
            return Check(NAME, "fault", text, {**measured, "other": other}, {}, (cause,))
    return Check(NAME, "ok", f"no other of {len(others)} names is the trained model", measured)


def _is_trained(answers: Answers, name: str) -> bool:
    """Return True if a name answers as the trained model, with the whole of an adapter."""
    within = not answers.distance(name).exceeds(answers.limit)
    return within and answers.is_whole(answers.dose(name))
