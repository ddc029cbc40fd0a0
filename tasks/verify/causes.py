"""Likely causes of a fault, from what was measured: a table of signatures.

docs/verify.md shows measured numbers of each ("What each fault looks like").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.core.terminal import typed
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.share import Share
from tasks.verify.check import Cause
from tasks.verify.comparison import Distance
from tasks.verify.reference import Reference

NEARER = 4.0
"""Another reference explains a server if its distance is smaller by this factor."""
LOCAL = 0.02
"""Share of the mean KL at the first tokens below which a fault depends on positions."""
GROWING = 1.2
"""Ratio of the errors in the last and the first third, above which they grow with the position."""
ROUNDING = 0.1
"""Mean KL (nats) of the coarsest rounding in use; above it, the weights are others."""
STRANGE = 2.0
"""Mean KL (nats) above which nothing of the model is left."""
SMALL = 0.2
"""Remainder below which a line explains what the adapter does."""
LARGE = 0.6
"""Remainder above which hardly anything of the adapter is left."""
_FOUR_BITS = ("nf4", "fp4", "int8")


@dataclass(frozen=True)
class Nearby:
    """Another model that a server was compared with.

    Attributes:
        name: what it is, for a person.
        distance: the server's distance from it.
    """

    name: str
    distance: Distance


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured about one name of a server.

    Attributes:
        reference: the trained model.
        model: name that was asked.
        distance: from the trained model.
        limit: limits of that distance.
        dose: of the adapter; None without adapter, or if it cannot be measured.
        from_base: distance from the base; None without adapter.
        base: distance of the server's own base from the witness's base; None if it has none.
        siblings: other checkpoints of the training, and other trainings beside it.
    """

    reference: Reference
    model: str
    distance: Distance
    limit: DriftLimit
    dose: Share | None = None
    from_base: Distance | None = None
    base: Distance | None = None
    siblings: Sequence[Nearby] = ()


def causes(evidence: Evidence) -> tuple[Cause, ...]:
    """Return the likely causes of a fault, the likeliest first; at least one."""
    return tuple(_causes(evidence)) or (_other_weights(evidence),)


def _causes(evidence: Evidence) -> Iterator[Cause]:
    kl, whole = evidence.distance.mean_kl, evidence.dose
    if whole is not None and not whole.is_certain:  # coarse numbers drown the adapter
        whole = None
    sibling = _nearest(evidence)
    base_kl = evidence.from_base.mean_kl if evidence.from_base else math.inf
    is_base = base_kl * NEARER < kl and (whole is None or abs(whole.value) < 0.2)
    # Below the noise of the server's format both are as near; the dose tells.
    is_light = whole is not None and not evidence.distance.exceeds(evidence.limit)
    is_base |= whole is not None and is_light and whole.value < 0.2
    if is_base and not (sibling and sibling.distance.mean_kl < base_kl):
        yield _base_served(evidence)
        if is_light and evidence.base is None:
            yield _rounded_away(evidence)
        return
    if sibling is not None:
        yield _other_checkpoint(evidence, sibling)
        return
    if whole is not None and not whole.is_whole:
        yield from _partial(evidence, whole)
    if kl > STRANGE:
        yield _other_weights(evidence)
        return
    if _depends_on_position(evidence):
        yield Cause(
            "rope",
            f"the first token of a text is right (KL {evidence.distance.first_kl:.1e}) and the "
            f"error grows with the position ({evidence.distance.growth:.1f} times from the first "
            "to the last third): rotary embedding with another theta or scaling",
            "compare rope_theta, rope_scaling and rope_parameters in config.json of the served "
            "folder and of the base (a file of transformers 5 read by an older engine loses them), "
            "and start without --rope-scaling, --rope-theta and --hf-overrides",
        )
    if evidence.reference.quantization in _FOUR_BITS and _base_differs(evidence):
        yield _base_precision(evidence)
    if whole is not None and whole.is_whole and not _base_differs(evidence):
        # Rounded weights, or a rounded KV cache, would change the base's answers as well.
        seen = f"mean KL {kl:.1e}, while the base on this server is exact"
        yield _part(evidence, seen)
        if kl > ROUNDING:  # a large scale moves logits by less than in proportion
            yield _scaled(evidence, seen)
    elif kl <= ROUNDING and (whole is None or whole.is_whole):
        yield _rounded(evidence)
    yield _other_weights(evidence)


def _base_differs(evidence: Evidence) -> bool:
    """Return True if the server's base is not the witness's, or cannot be asked."""
    return evidence.base is None or evidence.base.exceeds(evidence.limit)


def _nearest(evidence: Evidence) -> Nearby | None:
    """Return the checkpoint that the server is nearest to, if that explains it."""
    nearest = min(evidence.siblings, key=lambda near: near.distance.mean_kl, default=None)
    if nearest is None or nearest.distance.mean_kl * NEARER > evidence.distance.mean_kl:
        return None
    return nearest


def _depends_on_position(evidence: Evidence) -> bool:
    """Return True if positions without a past are right; of one token, rotation changes nothing."""
    measured = evidence.distance
    first = measured.first_kl <= max(LOCAL * measured.mean_kl, evidence.limit.mean_kl / 4)
    return first and measured.growth > GROWING


def _base_served(evidence: Evidence) -> Cause:
    assert evidence.from_base is not None
    return Cause(
        "base-served",
        f"{evidence.model!r} answers as the base without the adapter (KL from the base "
        f"{evidence.from_base.mean_kl:.1e}, from the trained {evidence.distance.mean_kl:.1e})",
        "look for 'LoRA' warnings in the server's log; check that the names of the adapter's "
        "modules match those of the served class, start with --enable-lora --lora-modules "
        f"{evidence.model}={evidence.reference.folder}, or merge it: python flows/deliver.py "
        f"{typed('source', evidence.reference.folder)} base=<the base> out=<a new folder>",
    )


def _other_checkpoint(evidence: Evidence, sibling: Nearby) -> Cause:
    return Cause(
        "other-checkpoint" if sibling.name.startswith("checkpoint-") else "other-adapter",
        f"{evidence.model!r} answers as {sibling.name} (KL {sibling.distance.mean_kl:.1e}), not as "
        f"{evidence.reference.folder.name} (KL {evidence.distance.mean_kl:.1e})",
        f"load {evidence.reference.folder} under this name and restart the server, or verify what "
        f"is served: {typed('source', evidence.reference.folder.parent / sibling.name)}",
    )


def _partial(evidence: Evidence, measured: Share) -> Iterator[Cause]:
    settings, folder = evidence.reference.adapter, evidence.reference.folder
    rank = settings.get("r")
    root = math.sqrt(rank) if isinstance(rank, int) and rank > 0 else math.inf
    lost = settings.get("use_rslora") and abs(measured.value * root - 1) < 0.2
    amount = f"{measured.text} of the adapter answers"
    line = f"the rest of the difference is {measured.remainder:.0%} of the adapter's effect"
    scale = _scaled(evidence, f"{amount}; {line}", "; rsLoRA's scale was lost" if lost else "")
    part = _part(evidence, f"{amount}; {line}")
    other = Cause(
        "other-adapter",
        f"{amount}; {line}: an adapter of another training",
        f"load {folder} under this name: --lora-modules {evidence.model}={folder}",
    )
    rounded = () if evidence.base is not None or measured.value > 1 else (_rounded_away(evidence),)
    if measured.remainder < SMALL:
        yield from (scale, part, *rounded)
    else:
        yield from (other, part) if measured.remainder > LARGE else (part, other)
        yield from rounded


def _scaled(evidence: Evidence, seen: str, more: str = "") -> Cause:
    settings, folder = evidence.reference.adapter, evidence.reference.folder
    return Cause(
        "adapter-scaled",
        f"{seen}: its scale is not {settings.get('lora_alpha', 'alpha')}/"
        f"{'sqrt(r)' if settings.get('use_rslora') else settings.get('r', 'r')}{more}",
        f"compare r, lora_alpha, use_rslora and rank_pattern in {folder}/adapter_config.json with "
        "the record; merge with python flows/deliver.py, which uses the adapter's own scale",
    )


def _part(evidence: Evidence, seen: str) -> Cause:
    folder = evidence.reference.folder
    return Cause(
        "partly-other-weights",
        f"{seen}: some modules of the adapter are not applied, or are of another step",
        "look for skipped or unexpected modules in the server's log (--lora-target-modules); merge "
        f"the adapter: python flows/deliver.py {typed('source', folder)} base=<the base> "
        "out=<a new folder>",
    )


def _rounded_away(evidence: Evidence) -> Cause:
    assert evidence.dose is not None
    return Cause(
        "rounded-away",
        f"{evidence.dose.text} of the adapter answers: if it was merged in 16 bits by rounding to "
        "nearest, updates below half a step of the base's weights are gone",
        "merge again: python flows/deliver.py source=<the adapter> base=<the base> out=<a new "
        "folder> merge.rounding=unbiased, or convert.dtype=float32",
    )


def _base_precision(evidence: Evidence) -> Cause:
    method = evidence.reference.quantization
    seen = (
        f"the server's base differs from the one in training (KL {evidence.base.mean_kl:.1e})"
        if evidence.base is not None
        else f"what differs is not the adapter (KL {evidence.distance.mean_kl:.1e})"
    )
    return Cause(
        "nf4-on-16-bit",
        f"the adapter was trained on a base in {method}, and {seen}: it is applied to, or merged "
        "into, the 16-bit base",
        "merge into the dequantized base: python flows/deliver.py "
        f"{typed('source', evidence.reference.folder)} base=<the base> "
        "out=<a new folder>; or serve the base as in training, by an engine that loads it in 4 "
        "bits",
    )


def _rounded(evidence: Evidence) -> Cause:
    return Cause(
        "quantised",
        f"the model is the trained one with coarser numbers (mean KL "
        f"{evidence.distance.mean_kl:.1e}): quantised weights or a quantised KV cache",
        "start the server with --dtype bfloat16 --kv-cache-dtype auto and without --quantization "
        "(vLLM's /metrics show cache_dtype); if it is meant to be quantised, profile=relaxed",
    )


def _other_weights(evidence: Evidence) -> Cause:
    measured, folder = evidence.distance, evidence.reference.folder
    strange = measured.mean_kl > STRANGE
    left = "the server has another model" if strange else "the server has other weights"
    read = "python flows/audit.py source=<what the server loaded> values=true"
    if (folder / "adapter_config.json").is_file():
        read += f" base=<the base> {typed('adapter', folder)}"
    return Cause(
        "other-weights",
        f"mean KL {measured.mean_kl:.2g}, top-1 agreement {measured.top1_agreement:.2f}: {left}",
        f"read every byte of the server's folder: {read}; a bad file: copy it again",
    )
