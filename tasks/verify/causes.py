"""Likely causes of other weights, by their signatures in the numbers.

docs/verify.md shows measured numbers of each ("What each fault looks like").
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tasks.core.report import Cause
from tasks.core.terminal import typed
from tasks.verify.asked import Asked

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


class Evidence:
    """Everything that was measured about the model of `Asked`, and what it looks like."""

    def __init__(self, asked: Asked) -> None:
        model, base, dose = asked.model, asked.base, asked.clear_dose(asked.model)
        self.reference, self.model, self.folder = asked.reference, model, asked.reference.folder
        self.distance = asked.distance(model)
        self.kl = self.distance.mean_kl
        self.is_within = not self.distance.beyond(asked.limit)
        # Coarse numbers drown the adapter.
        self.dose = dose if dose is not None and dose.is_certain else None
        self.is_whole = self.dose is not None and self.dose.is_whole
        self.remainder = self.dose.remainder if self.dose else math.nan
        from_base = asked.from_base(model)
        self.from_base = from_base.mean_kl if from_base else math.inf
        theirs = asked.from_base(base) if base is not None and base != model else None
        self.base = theirs.mean_kl if theirs else None
        self.has_base = theirs is not None and not theirs.beyond(asked.limit)
        siblings = {name: each.mean_kl for name, each in asked.from_siblings(model).items()}
        self.sibling = min(siblings, key=lambda name: siblings[name], default="")
        self.from_sibling = siblings.get(self.sibling, math.inf)

        # What explains the server: its base, another record, or neither.
        other = self.from_sibling * NEARER <= self.kl
        share = self.dose.value if self.dose else 0.0
        is_base = self.from_base * NEARER < self.kl and abs(share) < 0.2
        # Below the noise of the server's format both are as near; the dose tells.
        is_base |= self.dose is not None and self.is_within and share < 0.2
        self.is_base = is_base and not (other and self.from_sibling < self.from_base)
        self.is_other = other and not self.is_base
        self.is_free = not self.is_base and not self.is_other
        self.is_partial = self.is_free and self.dose is not None and not self.is_whole
        self.is_near = self.is_free and self.kl <= STRANGE
        # Of one token, rotation changes nothing.
        first = self.distance.first_kl <= max(LOCAL * self.kl, asked.limit.mean_kl / 4)
        self.depends_on_position = first and self.distance.growth > GROWING
        lost = (self.is_base and self.is_within) or (self.is_partial and share <= 1)
        self.may_be_rounded = lost and self.dose is not None and theirs is None

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
        """Share of the adapter that answers, as a sentence."""
        if self.is_whole or self.dose is None:
            return f"mean KL {self.kl:.1e}, while the base on this server is exact"
        line = f"the rest of the difference is {self.remainder:.0%} of the adapter's effect"
        return f"{self.dose.text} of the adapter answers; {line}"

    @property
    def merge(self) -> str:
        """The command that merges the adapter."""
        source = typed("source", self.folder)
        return f"python flows/deliver.py {source} base=<the base> out=<a new folder>"


def causes(asked: Asked) -> tuple[Cause, ...]:
    """Return the likely causes of a fault of the weights, the likeliest first; at least one."""
    return tuple(_causes(Evidence(asked)))


def _causes(e: Evidence) -> Iterator[Cause]:
    scaled = Cause(
        "adapter-scaled",
        f"{e.seen}: its scale is not {e.scale}",
        f"compare r, lora_alpha, use_rslora and rank_pattern in {e.folder}/adapter_config.json "
        "with the record; merge with python flows/deliver.py, which uses the adapter's own scale",
    )
    elsewhere = Cause(
        "other-adapter",
        f"{e.seen}: an adapter of another training",
        f"load {e.folder} under this name: --lora-modules {e.model}={e.folder}",
    )
    if e.is_base:
        yield Cause(
            "base-served",
            f"{e.model!r} answers as the base without the adapter (KL from the base "
            f"{e.from_base:.1e}, from the trained {e.kl:.1e})",
            "look for 'LoRA' warnings in the server's log; check that the names of the adapter's "
            "modules match those of the served class, start with --enable-lora --lora-modules "
            f"{e.model}={e.folder}, or merge it: {e.merge}",
        )
    if e.is_other:
        yield Cause(
            "other-checkpoint" if e.sibling.startswith("checkpoint-") else "other-adapter",
            f"{e.model!r} answers as {e.sibling} (KL {e.from_sibling:.1e}), not as "
            f"{e.folder.name} (KL {e.kl:.1e})",
            f"load {e.folder} under this name and restart the server, or verify what is served: "
            f"{typed('source', e.folder.parent / e.sibling)}",
        )
    if e.is_partial and e.remainder < SMALL:
        yield scaled
    if e.is_partial and e.remainder > LARGE:
        yield elsewhere
    # Rounded weights, or a rounded KV cache, would change the base's answers as well.
    if e.is_partial or (e.is_near and e.is_whole and e.has_base):
        yield Cause(
            "partly-other-weights",
            f"{e.seen}: some modules of the adapter are not applied, or are of another step",
            "look for skipped or unexpected modules in the server's log (--lora-target-modules); "
            f"merge the adapter: {e.merge}",
        )
    if e.is_partial and SMALL <= e.remainder <= LARGE:
        yield elsewhere
    if e.may_be_rounded and e.dose is not None:
        yield Cause(
            "rounded-away",
            f"{e.dose.text} of the adapter answers: if it was merged in 16 bits by rounding to "
            "nearest, updates below half a step of the base's weights are gone",
            "merge again: python flows/deliver.py source=<the adapter> base=<the base> out=<a new "
            "folder> merge.rounding=unbiased, or convert.dtype=float32",
        )
    if e.is_near and e.depends_on_position:
        yield Cause(
            "rope",
            f"the first token of a text is right (KL {e.distance.first_kl:.1e}) and the error "
            f"grows with the position ({e.distance.growth:.1f} times from the first to the last "
            "third): rotary embedding with another theta or scaling",
            "compare rope_theta, rope_scaling and rope_parameters in config.json of the served "
            "folder and of the base (a file of transformers 5 read by an older engine loses them), "
            "and start without --rope-scaling, --rope-theta and --hf-overrides",
        )
    if e.is_near and e.reference.quantization in ("nf4", "fp4", "int8") and not e.has_base:
        yield Cause(
            "nf4-on-16-bit",
            f"the adapter was trained on a base in {e.reference.quantization}, and the server's "
            f"differs from it (KL {e.kl if e.base is None else e.base:.1e}): the adapter is "
            "applied to, or merged into, the 16-bit base",
            f"merge into the dequantized base: {e.merge}; or serve the base as in training, by an "
            "engine that loads it in 4 bits",
        )
    # A large scale moves logits by less than in proportion.
    if e.is_near and e.is_whole and e.has_base and e.kl > ROUNDING:
        yield scaled
    if e.is_near and e.kl <= ROUNDING and (e.dose is None or (e.is_whole and not e.has_base)):
        yield Cause(
            "quantised",
            f"the model is the trained one with coarser numbers (mean KL {e.kl:.1e}): quantised "
            "weights or a quantised KV cache",
            "start the server with --dtype bfloat16 --kv-cache-dtype auto and without "
            "--quantization (vLLM's /metrics show cache_dtype); if it is meant to be quantised, "
            "profile=relaxed",
        )
    if e.is_free:
        yield Cause(
            "other-weights",
            f"mean KL {e.kl:.2g}, top-1 agreement {e.distance.top1_agreement:.2f}: the server has "
            f"{'another model' if e.kl > STRANGE else 'other weights'}",
            "read every byte of what the server loaded: python flows/audit.py source=<its folder> "
            "values=true; a bad file: copy it again",
        )
