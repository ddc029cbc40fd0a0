"""Bytes a rank needs to train, by arithmetic on the model's `config.json`. Knows no torch.

The accounting of mixed-precision AdamW under ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models"): 16-bit weights and gradients, fp32 master
weights and two fp32 moments, each divided over the ranks from the stage on that partitions it. What
DeepSpeed 0.19 holds beside that, buffers and the step's own copies, was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.training.activations import kept_by_a_row
from tasks.training.job import Settings
from tasks.training.sizes import Sizes

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""
_SCALE_BYTES = {True: 1.03 / 64, False: 4 / 64}
"""A 4-bit weight's share of its block's scale (64 weights), itself quantised or in fp32."""
_STEP_BYTES = {0: 4, 1: 8, 2: 8, 3: 12}
"""Of a trained weight in the optimizer's step: the root of the second moment, from stage 1 on the
gradient in fp32, and flattened once more in stage 3."""
_MAX_LIVE = 10**9
"""Elements that ZeRO-3 holds gathered at most (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank's device, or in its host memory where offloaded.

    Attributes:
        parameters: weights held, and those that ZeRO-3 gathers for a pass.
        gradients: and the bucket that they are reduced in.
        optimizer: master weights and moments.
        step: what the optimizer's step needs for the moment: gradients in fp32, and copies.
        activations: what the longest row needs in a pass.
        reuses: whether the step has the activations' memory again. An accelerator's allocator sees
            to that; the host's leaves freed pieces where they are.
    """

    parameters: int
    gradients: int
    optimizer: int
    step: int
    activations: int
    reuses: bool = False

    @property
    def states(self) -> int:
        """What is needed however short the samples are."""
        return self.parameters + self.gradients + self.optimizer + self.step

    @property
    def total(self) -> int:
        """The peak, on the longest samples."""
        again = min(self.step, self.activations) if self.reuses else 0
        return self.states + self.activations - again

    def parts(self) -> dict[str, int]:
        """Bytes by name, the total left out."""
        names = ("parameters", "gradients", "optimizer", "step", "activations")
        return {name: getattr(self, name) for name in names}


def estimate(
    config: Mapping[str, Any], settings: Settings, world_size: int, *, gpu: bool = False
) -> MemoryEstimate:
    """What one of `world_size` ranks needs at its peak.

    Args:
        config: contents of the base's `config.json`.
        settings: what is trained and how.
        world_size: ranks.
        gpu: whether it computes on one. A CPU keeps attention's probabilities of short sequences,
            and computes 16-bit products through fp32.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    sizes, zero, peft = Sizes.of(config), settings.zero, settings.peft
    item = ITEM[settings.dtype]
    total = sizes.linear_weights() + sizes.other_weights()
    trained = total if peft.kind == "none" else adapter_weights(sizes, settings)
    linear = item if peft.kind != "qlora" else 0.5 + _SCALE_BYTES[peft.double_quant]
    held = sizes.linear_weights() * linear + sizes.other_weights() * item
    if peft.kind != "none":
        held += trained * item
    if peft.kind == "qlora" and not gpu:
        # The file that was quantised stays mapped as long as one of its tensors is in use.
        held += total * item
    shared = {stage: world_size if zero.stage >= stage else 1 for stage in (1, 2, 3)}
    if zero.stage == 3:
        held = held / shared[3] + min(total, _MAX_LIVE) * item
    bucket = min(trained, zero.bucket_size) * item if zero.stage else 0
    mine = trained / shared[1]
    return MemoryEstimate(
        parameters=int(held),
        gradients=int(trained * item / shared[2] + bucket),
        optimizer=int(mine * _optimizer_bytes(settings)),
        step=int(mine * _STEP_BYTES[zero.stage]),
        activations=kept_by_a_row(sizes, settings, item=item, gpu=gpu),
        reuses=gpu,
    )


def _optimizer_bytes(settings: Settings) -> float:
    """Of one weight: the fp32 master copy where weights have 16 bits, and two moments."""
    master = 0 if settings.dtype == "float32" else 4
    moments = 8.0 if settings.optim.optimizer == "adamw" else 2 * (1 + 4 / 256)
    return master + moments


def adapter_weights(sizes: Sizes, settings: Settings) -> int:
    """Trained weights of an adapter: pairs, magnitudes, modules that are saved whole.

    A pair has rank x (in + out) weights, twice that for PiSSA (`pissa.py`).
    """
    peft, linears = settings.peft, sizes.linears()
    targets = linears if isinstance(peft.target_modules, str) else peft.target_modules
    chosen = {n: linears[n] for n in targets if n in linears and n not in peft.exclude_modules}
    double = 2 if peft.init == "pissa" else 1
    ranks = peft.rank_pattern or {}
    layer = sum(
        double * ranks.get(name, peft.rank) * (i + o) + (o if peft.use_dora else 0)
        for name, (i, o) in chosen.items()
    )
    tables = sum(name in ("embed_tokens", "lm_head") for name in peft.modules_to_save)
    return sizes.layers * layer + tables * sizes.vocab * sizes.hidden
