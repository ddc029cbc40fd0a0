"""Check that a name gives the trained model's log-probabilities, with the whole of an adapter.

An adapter that moves the model by less than a profile allows passes the comparison of
distributions when it is not applied at all; its dose does not. Other weights have likely causes,
by their signatures in the numbers: docs/verify.md, "What each fault looks like".
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.core.report import Cause, Row
from tasks.core.terminal import command, typed
from tasks.drift.verdict import DECIDED, TOLERANCE
from tasks.verify.compare import BLURRED, FEWEST, Asked
from tasks.verify.server import ServerError

MOST = 16
"""Most other names of a server that are asked."""
NEARER = 4.0
"""Another reference explains a server if its distance is smaller by this factor."""
LOCAL = 0.02
"""Share of the mean KL at the first tokens below which a fault depends on positions."""
LASTING = 0.8
"""`Distance.growth` above which an error lasts to the end of a text; those of rounding shrink."""
GROWING = 1.2
"""The same where another part of the adapter answers, which another rotation can look like."""
ROUNDING = 0.1
"""Mean KL (nats) of the coarsest rounding in use; above it, the weights are others."""
STRANGE = 2.0
"""Mean KL (nats) above which nothing of the model is left."""
SMALL, LARGE = 0.2, 0.6
"""Remainders below which a line explains what the adapter does, and above which hardly anything of
the adapter is left."""
_OF_ADAPTERS = (
    "base-served", "adapter-scaled", "other-adapter", "partly-other-weights", "rounded-away",
)  # fmt: skip


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
    return Row(name, "fault", text, numbers, swapped + _causes(asked), limits)


def _swapped(asked: Asked) -> tuple[Cause, ...]:
    """Return the cause of another name of the server that answers as the trained model."""
    names = [entry.name for entry in asked.server.models()]
    for other in [name for name in names if name not in (asked.model, asked.base)][:MOST]:
        try:
            is_trained = asked.is_trained(other)
        except ServerError as error:
            if error.code not in ("missing", "length", "request"):
                raise
            continue  # this name does not take our probes, so that it is another model
        if is_trained:
            text = f"{other!r} answers as the model that {asked.model!r} should be"
            hint = f"exchange them: --lora-modules {asked.model}={asked.reference.folder}"
            return (Cause("adapters-swapped", text, hint),)
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
    part = f"{measured.text} of the adapter answers"
    moves = f"the adapter moves these probes by {measured.signal:.1e} nats"
    if measured.signal <= asked.noise:
        text = f"{moves}, as little as the trainer's rounding ({asked.noise:.1e}): {_MORE}"
        return Row(name, "unknown", text, numbers)
    if tolerance > BLURRED:
        text = f"{part}, but {moves}, far below the noise of {asked.format}: {_MORE}"
        return Row(name, "unknown", text, numbers)
    if not asked.is_whole(measured):
        text = f"{part} under {model!r}, expected 1"
        return Row(name, "fault", text, numbers, _causes(asked), limits)
    if not measured.is_certain:
        text = f"{part}: too uncertain to tell 1 from 0.5"
        return Row(name, "unknown", text, numbers, limit=limits)
    least = 1 - max(min(tolerance, DECIDED), measured.high - measured.low)
    text = f"{part} under {model!r}; less than {least:.2f} would have been seen"
    return Row(name, "ok", text, numbers, limit=limits)


_MORE = (
    "a record with rows of the training data (plumbline-witness), or smoke.texts=<them>, can tell"
)


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
        numbers["dose"], limits["dose"] = leaked.value, 0.0
    if leaked is not None and leaked.low > 0 and leaked.value > TOLERANCE:
        text = f"{leaked.text} of the adapter answers under the base's name {own!r}, expected 0"
        cause = Cause(
            "lora-leak",
            f"requests for {own!r} are answered with the adapter: it is merged into the base, or "
            "leaks into its requests",
            "serve the base's own folder under its name; serve adapter and base from two servers "
            "until the engine is fixed (vLLM #42008, #49063)",
        )
        return Row(name, "fault", text, numbers, (cause,), limits)
    kl = f"mean KL {measured.mean_kl:.1e} nats per token (limit {limit.mean_kl:.1e})"
    if measured.mean_kl <= limit.mean_kl and measured.p95_kl <= limit.p95_kl:
        text = f"{own!r} answers as the base of the training: {kl}"
        return Row(name, "ok", text, numbers, limit=limits)
    if asked.reference.quantization not in ("", "none"):
        cause = Cause("nf4-on-16-bit", *_nf4_on_16_bit(asked))
    else:
        recorded = (asked.reference.facts.get("base") or {}).get("name")
        cause = Cause(
            "other-base",
            f"{own!r} is another model, or another revision, than the one that was trained",
            f"serve the base of the record: {recorded or 'its name was not recorded'}",
        )
    text = f"{own!r} is not the base of the training: {kl}"
    return Row(name, "fault", text, numbers, (cause,), limits)


def _nf4_on_16_bit(asked: Asked) -> tuple[str, str]:
    return (
        f"the adapter was trained on a base in {asked.reference.quantization}, and the server's is "
        "stored in another way",
        f"merge into the dequantized base: {_merge(asked)}; or serve it quantised as in training",
    )


def _merge(asked: Asked) -> str:
    folder = asked.reference.folder
    return command("deliver", source=folder, base="<the base>", out="<a new folder>")


def _causes(asked: Asked) -> tuple[Cause, ...]:
    """Return the likely causes of a fault of the weights, the likeliest first; at least one."""
    reference, model, folder = asked.reference, asked.model, asked.reference.folder
    distance, kl = asked.distance(model), asked.distance(model).mean_kl
    is_within = not distance.beyond(asked.limit)
    dose = asked.clear_dose(model)
    if dose is not None and not dose.is_certain:
        dose = None  # coarse numbers drown the adapter
    share, remainder = (dose.value, dose.remainder) if dose else (0.0, math.nan)
    is_whole = dose is not None and dose.is_whole
    to_base = asked.from_base(model)
    from_base = to_base.mean_kl if to_base else math.inf
    served_base = asked.from_base(asked.base if asked.base != model else None)
    has_base = served_base is not None and not served_base.beyond(asked.limit)
    siblings = asked.from_siblings(model)
    sibling = min(siblings, key=lambda name: siblings[name], default="")
    from_sibling = siblings.get(sibling, math.inf)

    # What explains the server: its base, another record, or neither.
    is_other = from_sibling * NEARER <= kl
    is_base = from_base * NEARER < kl and abs(share) < 0.2
    # Below the noise of the server's format both are as near; the dose tells.
    is_base |= dose is not None and is_within and share < 0.2
    is_base = is_base and not (is_other and from_sibling < from_base)
    is_other = is_other and not is_base
    is_free = not is_base and not is_other
    is_partial = is_free and dose is not None and not is_whole
    is_near = is_free and kl <= STRANGE

    # Rounded weights, or a rounded KV cache, would change the base's answers as well.
    is_elsewhere = is_near and is_whole and has_base
    is_lost = (is_base and is_within) or (is_partial and share <= 1)
    is_lost = is_lost and dose is not None and served_base is None
    # Of one token, rotation changes nothing.
    first_is_right = distance.first_kl <= max(LOCAL * kl, asked.limit.mean_kl / 4)
    lasting = LASTING if dose is None or is_whole else GROWING
    is_rope = is_near and first_is_right and distance.growth > lasting
    was_packed = reference.quantization in ("nf4", "fp4", "int8")
    is_coarse = is_near and kl <= ROUNDING and (dose is None or (is_whole and not has_base))

    merge, part = _merge(asked), f"{dose.text} of the adapter answers" if dose else ""
    is_merged = (folder / "config.json").is_file()
    load = f"load {folder} under this name: --lora-modules {model}={folder}"
    if is_merged:
        load = f"serve this folder, as it is: {command('serve')} {shlex.quote(str(folder))}"
    seen = f"mean KL {kl:.1e}, while the base on this server is exact"
    if dose is not None and not is_whole:
        rest = f"the rest of the difference is {remainder:.0%} of the adapter's effect"
        seen = f"{part}; {rest}"
    scaled = (
        f"{seen}: its scale is not {_scale(reference.adapter, share)}",
        f"compare r, lora_alpha, use_rslora and rank_pattern in {folder}/adapter_config.json "
        f"with the record; or merge it, by the adapter's own scale: {merge}",
    )
    elsewhere = (f"{seen}: an adapter of another training", load)
    rules: list[tuple[str, bool, tuple[str, str]]] = [
        ("base-served", is_base, (
            f"{model!r} answers as the base without the adapter (KL from the base "
            f"{from_base:.1e}, from the trained {kl:.1e})",
            "look for 'LoRA' warnings in the server's log; check that the names of the adapter's "
            "modules match those of the served class, start with --enable-lora --lora-modules "
            f"{model}={folder}, or merge it: {merge}",
        )),
        ("other-checkpoint" if sibling.startswith("checkpoint-") else "other-adapter", is_other, (
            f"{model!r} answers as {sibling} (KL {from_sibling:.1e}), not as {folder.name} "
            f"(KL {kl:.1e})",
            f"{load}, and restart the server, or verify what is served: "
            f"{typed('source', folder.parent / sibling)}",
        )),
        ("adapter-scaled", is_partial and remainder < SMALL, scaled),
        ("other-adapter", is_partial and remainder > LARGE, elsewhere),
        ("partly-other-weights", is_partial or is_elsewhere, (
            f"{seen}: some modules of the adapter are not applied, or are of another step",
            "look for skipped or unexpected modules in the server's log (--lora-target-modules); "
            f"merge the adapter: {merge}",
        )),
        ("other-adapter", is_partial and SMALL <= remainder <= LARGE, elsewhere),
        ("rounded-away", is_lost, (
            f"{part}: if it was merged in 16 bits by rounding to nearest, updates below half a "
            "step of the base's weights are gone",
            f"merge again: {merge} merge.rounding=unbiased, or convert.dtype=float32",
        )),
        ("rope", is_rope, (
            f"the first token of a text is right (KL {distance.first_kl:.1e}) and the later ones "
            f"are not, the last third {distance.growth:.1f} times as wrong as the first: rotary "
            "embedding with another theta or scaling",
            "compare rope_theta, rope_scaling and rope_parameters in config.json of the served "
            "folder and of the base (a file of transformers 5 read by an older engine loses them), "
            "and start without --rope-scaling, --rope-theta and --hf-overrides",
        )),
        ("nf4-on-16-bit", is_near and was_packed and not has_base, _nf4_on_16_bit(asked)),
        # A large scale moves logits by less than in proportion.
        ("adapter-scaled", is_elsewhere and kl > ROUNDING, scaled),
        ("quantised", is_coarse, (
            f"the model is the trained one with coarser numbers (mean KL {kl:.1e}): quantised "
            "weights or a quantised KV cache",
            "start the server with --dtype bfloat16 --kv-cache-dtype auto and without "
            "--quantization; if it is meant to be quantised, profile=relaxed",
        )),
        ("other-weights", is_free, (
            f"mean KL {kl:.2g}, top-1 agreement {distance.top1_agreement:.2f}: the server has "
            f"{'another model' if kl > STRANGE else 'other weights'}",
            f"read every byte of what the server loaded: {command('audit')} source=<its folder> "
            "values=true; a bad file: copy it again",
        )),
    ]  # fmt: skip
    causes = tuple(Cause(code, *texts) for code, applies, texts in rules if applies)
    if is_merged:  # no server can load it as an adapter, and nothing is left to merge
        return tuple(
            replace(each, hint=load) if each.code in _OF_ADAPTERS else each for each in causes
        )
    return causes


def _scale(adapter: Mapping[str, Any], share: float) -> str:
    """Return the scale of an adapter, and whether that of rsLoRA was lost."""
    rank, alpha = adapter.get("r"), adapter.get("lora_alpha", "alpha")
    if not adapter.get("use_rslora"):
        return f"{alpha}/{rank or 'r'}"
    is_lost = rank is not None and abs(share * math.sqrt(rank) - 1) < 0.2
    return f"{alpha}/sqrt(r)" + ("; rsLoRA's scale was lost" if is_lost else "")
