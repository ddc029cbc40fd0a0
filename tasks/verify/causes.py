"""Likely causes of other weights: a table of signatures.

docs/verify.md shows measured numbers of each ("What each fault looks like").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tasks.core.report import Cause
from tasks.core.terminal import typed
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.share import Share
from tasks.verify.asked import Asked
from tasks.verify.compare import Distance
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
SMALL, LARGE = 0.2, 0.6
"""Remainders below which a line explains what the adapter does, and above which hardly anything of
the adapter is left."""
_FOUR_BITS = ("nf4", "fp4", "int8")


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
        siblings: distance from other checkpoints of the training, and other trainings beside it.
    """

    reference: Reference
    model: str
    distance: Distance
    limit: DriftLimit
    dose: Share | None = None
    from_base: Distance | None = None
    base: Distance | None = None
    siblings: Mapping[str, Distance] = field(default_factory=dict)

    @property
    def kl(self) -> float:
        """Mean KL from the trained model."""
        return self.distance.mean_kl

    @property
    def is_light(self) -> bool:
        """True if only the dose tells this model from the trained one."""
        return self.dose is not None and not self.distance.exceeds(self.limit)

    @property
    def is_base(self) -> bool:
        """True if it answers as the base."""
        if self.from_base is None:
            return False
        none = self.dose is None or abs(self.dose.value) < 0.2
        # Below the noise of the server's format both are as near; the dose tells.
        light = self.is_light and self.dose is not None and self.dose.value < 0.2
        is_base = light or (self.from_base.mean_kl * NEARER < self.kl and none)
        sibling = self.sibling
        closer = sibling and self.siblings[sibling].mean_kl < self.from_base.mean_kl
        return is_base and not closer

    @property
    def sibling(self) -> str:
        """The nearest other model, if that explains the server; else ""."""
        near = min(self.siblings, key=lambda name: self.siblings[name].mean_kl, default="")
        return near if near and self.siblings[near].mean_kl * NEARER <= self.kl else ""

    @property
    def other(self) -> str:
        """The sibling that answers, unless it is the base."""
        return "" if self.is_base else self.sibling

    @property
    def is_free(self) -> bool:
        """True if neither the base nor another record explains the server."""
        return not self.is_base and not self.sibling

    @property
    def is_partial(self) -> bool:
        """True if a part of the adapter answers."""
        return self.is_free and self.dose is not None and not self.dose.is_whole

    @property
    def remainder(self) -> float:
        """Share of the adapter's effect that no scale of it explains."""
        return self.dose.remainder if self.dose else math.nan

    @property
    def is_near(self) -> bool:
        """True if something of the trained model is left."""
        return self.is_free and self.kl <= STRANGE

    @property
    def is_whole(self) -> bool:
        """True if the whole adapter answers."""
        return self.dose is not None and self.dose.is_whole

    @property
    def has_base(self) -> bool:
        """True if the server's base is the witness's."""
        return self.base is not None and not self.base.exceeds(self.limit)

    @property
    def depends_on_position(self) -> bool:
        """True if positions without a past are right; of one token, rotation changes nothing."""
        least = max(LOCAL * self.kl, self.limit.mean_kl / 4)
        return self.distance.first_kl <= least and self.distance.growth > GROWING

    @property
    def scale(self) -> str:
        """The scale of the adapter, and whether that of rsLoRA was lost."""
        settings, rank = self.reference.adapter, self.reference.adapter.get("r")
        root = math.sqrt(rank) if isinstance(rank, int) and rank > 0 else math.inf
        is_rs = settings.get("use_rslora")
        lost = is_rs and self.dose is not None and abs(self.dose.value * root - 1) < 0.2
        scale = f"{settings.get('lora_alpha', 'alpha')}/{'sqrt(r)' if is_rs else rank or 'r'}"
        return scale + ("; rsLoRA's scale was lost" if lost else "")

    @property
    def seen(self) -> str:
        """What of the adapter answers, for a person."""
        if self.is_whole or self.dose is None:
            return f"mean KL {self.kl:.1e}, while the base on this server is exact"
        line = f"the rest of the difference is {self.remainder:.0%} of the adapter's effect"
        return f"{self.dose.text} of the adapter answers; {line}"

    @property
    def merge(self) -> str:
        """The command that merges the adapter."""
        source = typed("source", self.reference.folder)
        return f"python flows/deliver.py {source} base=<the base> out=<a new folder>"

    @property
    def strange(self) -> str:
        """What the server has, by the size of the difference."""
        return (
            "the server has another model" if self.kl > STRANGE else "the server has other weights"
        )

    @property
    def read(self) -> str:
        """The command that reads every byte of a folder."""
        folder = self.reference.folder
        text = "python flows/audit.py source=<what the server loaded> values=true"
        if (folder / "adapter_config.json").is_file():
            text += f" base=<the base> {typed('adapter', folder)}"
        return text


class Rule(NamedTuple):
    """A cause with the signature that it has in the numbers."""

    code: str
    applies: Callable[[Evidence], bool]
    text: Callable[[Evidence], str]
    hint: Callable[[Evidence], str]


def _of_dose(e: Evidence) -> bool:
    """Return True if rounding at a merge could have lost a part of the adapter."""
    if e.base is not None or e.dose is None:
        return False
    return (e.is_base and e.is_light) or (e.is_partial and e.dose.value <= 1)


Text = Callable[[Evidence], str]
_SCALED: tuple[Text, Text] = (
    lambda e: f"{e.seen}: its scale is not {e.scale}",
    lambda e: (
        "compare r, lora_alpha, use_rslora and rank_pattern in "
        f"{e.reference.folder}/adapter_config.json with the record; merge with "
        "python flows/deliver.py, which uses the adapter's own scale"
    ),
)
_ELSEWHERE: tuple[Text, Text] = (
    lambda e: f"{e.seen}: an adapter of another training",
    lambda e: (
        f"load {e.reference.folder} under this name: --lora-modules {e.model}={e.reference.folder}"
    ),
)
RULES = (
    Rule(
        "base-served",
        lambda e: e.is_base,
        lambda e: (
            f"{e.model!r} answers as the base without the adapter (KL from the base "
            f"{e.from_base.mean_kl if e.from_base else 0:.1e}, from the trained {e.kl:.1e})"
        ),
        lambda e: (
            "look for 'LoRA' warnings in the server's log; check that the names of the adapter's "
            "modules match those of the served class, start with --enable-lora --lora-modules "
            f"{e.model}={e.reference.folder}, or merge it: {e.merge}"
        ),
    ),
    *(
        Rule(
            code,
            applies,
            lambda e: (
                f"{e.model!r} answers as {e.sibling} (KL {e.siblings[e.sibling].mean_kl:.1e}), "
                f"not as {e.reference.folder.name} (KL {e.kl:.1e})"
            ),
            lambda e: (
                f"load {e.reference.folder} under this name and restart the server, or verify what "
                f"is served: {typed('source', e.reference.folder.parent / e.sibling)}"
            ),
        )
        for code, applies in (
            ("other-checkpoint", lambda e: e.other.startswith("checkpoint-")),
            ("other-adapter", lambda e: bool(e.other) and not e.other.startswith("checkpoint-")),
        )
    ),
    Rule("adapter-scaled", lambda e: e.is_partial and e.remainder < SMALL, *_SCALED),
    Rule("other-adapter", lambda e: e.is_partial and e.remainder > LARGE, *_ELSEWHERE),
    Rule(
        "partly-other-weights",
        # Rounded weights, or a rounded KV cache, would change the base's answers as well.
        lambda e: e.is_partial or (e.is_near and e.is_whole and e.has_base),
        lambda e: f"{e.seen}: some modules of the adapter are not applied, or are of another step",
        lambda e: (
            "look for skipped or unexpected modules in the server's log (--lora-target-modules); "
            f"merge the adapter: {e.merge}"
        ),
    ),
    Rule("other-adapter", lambda e: e.is_partial and SMALL <= e.remainder <= LARGE, *_ELSEWHERE),
    Rule(
        "rounded-away",
        _of_dose,
        lambda e: (
            f"{e.dose.text if e.dose else ''} of the adapter answers: if it was merged in 16 bits "
            "by rounding to nearest, updates below half a step of the base's weights are gone"
        ),
        lambda e: (
            "merge again: python flows/deliver.py source=<the adapter> base=<the base> out=<a new "
            "folder> merge.rounding=unbiased, or convert.dtype=float32"
        ),
    ),
    Rule(
        "rope",
        lambda e: e.is_near and e.depends_on_position,
        lambda e: (
            f"the first token of a text is right (KL {e.distance.first_kl:.1e}) and the error "
            f"grows with the position ({e.distance.growth:.1f} times from the first to the last "
            "third): rotary embedding with another theta or scaling"
        ),
        lambda e: (
            "compare rope_theta, rope_scaling and rope_parameters in config.json of the served "
            "folder and of the base (a file of transformers 5 read by an older engine loses them), "
            "and start without --rope-scaling, --rope-theta and --hf-overrides"
        ),
    ),
    Rule(
        "nf4-on-16-bit",
        lambda e: e.is_near and e.reference.quantization in _FOUR_BITS and not e.has_base,
        lambda e: (
            f"the adapter was trained on a base in {e.reference.quantization}, and the server's "
            f"differs from it (KL {e.base.mean_kl if e.base else e.kl:.1e}): the adapter is "
            "applied to, or merged into, the 16-bit base"
        ),
        lambda e: (
            f"merge into the dequantized base: {e.merge}; or serve the base as in training, by an "
            "engine that loads it in 4 bits"
        ),
    ),
    Rule(
        "adapter-scaled",
        # A large scale moves logits by less than in proportion.
        lambda e: e.is_near and e.is_whole and e.has_base and e.kl > ROUNDING,
        *_SCALED,
    ),
    Rule(
        "quantised",
        lambda e: (
            e.is_near and e.kl <= ROUNDING and (e.dose is None or (e.is_whole and not e.has_base))
        ),
        lambda e: (
            f"the model is the trained one with coarser numbers (mean KL {e.kl:.1e}): quantised "
            "weights or a quantised KV cache"
        ),
        lambda e: (
            "start the server with --dtype bfloat16 --kv-cache-dtype auto and without "
            "--quantization (vLLM's /metrics show cache_dtype); if it is meant to be quantised, "
            "profile=relaxed"
        ),
    ),
    Rule(
        "other-weights",
        lambda e: e.is_free,
        lambda e: (
            f"mean KL {e.kl:.2g}, top-1 agreement {e.distance.top1_agreement:.2f}: {e.strange}"
        ),
        lambda e: f"read every byte of the server's folder: {e.read}; a bad file: copy it again",
    ),
)
"""All signatures, the likeliest first."""


def causes(asked: Asked) -> tuple[Cause, ...]:
    """Return the likely causes of a fault of the weights, the likeliest first; at least one."""
    model, base, dose = asked.model, asked.base, asked.clear_dose(asked.model)
    evidence = Evidence(
        reference=asked.reference,
        model=model,
        distance=asked.distance(model),
        limit=asked.limit,
        # Coarse numbers drown the adapter.
        dose=dose if dose is not None and dose.is_certain else None,
        from_base=asked.from_base(model),
        base=asked.from_base(base) if base is not None and base != model else None,
        siblings=asked.from_siblings(model),
    )
    return tuple(
        Cause(rule.code, rule.text(evidence), rule.hint(evidence))
        for rule in RULES
        if rule.applies(evidence)
    )
