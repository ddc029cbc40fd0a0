"""Bytes a rank needs to train, by arithmetic on the model's `config.json`. Knows no torch.

The accounting of mixed-precision AdamW under ZeRO (Rajbhandari et al., 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models"): 16-bit weights and gradients, fp32 master
weights and two fp32 moments, each divided over the ranks from the stage on that partitions it; and
what DeepSpeed 0.19, torch 2.13 and gloo hold beside that, read in their source.

Counted from where all libraries are imported and nothing is loaded, which is about `LIBRARIES`. Of
a CPU's rank it is resident memory: mapped weights count, and so does what glibc keeps. Its malloc
gives pieces above `RETURNED` back to the system when they are freed and keeps all others, with
holes between them (`HOLES`); so on a CPU the optimizer's step does not have the activations'
memory again, as it has it on an accelerator, whose allocator is torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tasks.training.job import Settings
from tasks.training.memory.activations import LARGEST_IN_HEAP, RowBytes, row_bytes
from tasks.training.memory.sizes import Sizes

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""
LIBRARIES = 2**30
"""A rank before it loads anything: 0.47 GiB on a CPU; a GPU's context takes about one."""
HOLES = 0.7
"""Of the heap's live bytes at its fullest: what lies free between pieces that are in use and fits
none that are asked for. This and the next number are fitted and not derived: mallinfo2 beside
resident memory said 0.5 to 0.6 with twelve layers and 0.9 with twenty-four, and this lies between.
Of a CPU's ranks alone."""
LEFT_BY_LAYERS = 0.48
"""Of what a layer takes when it is computed again for its backward pass, the part that stays
resident, layer by layer: freed, but between pieces that stay (what the layer before it was given,
gradients), so that the next layer does not fit. Resident memory said 0.47 with twelve layers of
width 768 and 0.49 with twenty-four of 1024."""
_SCALE_BYTES = {True: 1.03 / 64, False: 4 / 64}
"""A 4-bit weight's share of its block's scale (64 weights), itself quantised or in fp32."""
_PARTS = (
    "weights", "gathered", "gradients", "optimizer", "activations", "logits", "step",
    "communication", "allocator",
)  # fmt: skip
_MAX_LIVE = 10**9
"""Elements that ZeRO-3 holds gathered at most (`stage3_max_live_parameters`)."""
_SUB_GROUP = 10**9
"""Weights of a rank that ZeRO-3 steps at a time (`sub_group_size`)."""
_GLOO_THREADS = 2
"""Collectives that gloo works on at a time, each with a flat copy of all that it gathers."""
_ALLREDUCE = 500_000_000
"""Elements of gradients that ZeRO-0 flattens at a time (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank.

    Attributes:
        weights: held by this rank.
        gathered: weights that ZeRO-3 gathers for a pass.
        gradients: and the bucket that they are reduced in.
        optimizer: master weights and moments.
        activations: what the longest row needs in a pass, logits left out.
        logits: of the portion of tokens that the head works on, and their gradients.
        step: what the optimizer's step needs for the moment: gradients in fp32, and copies.
        communication: flat buffers of collectives.
        allocator: holes in the host's heap; none on an accelerator.
        stays: part of the activations that the heap keeps when the pass is over.
        released: part of the gradients that is gone when the step copies weights about.
        host: what is offloaded from an accelerator to the host; part of nothing above.
        mapped: part of a CPU's weights that is a mapped file: all ranks of a node share its pages.
        forward: what a pass without gradients needs; part of nothing above.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0
    logits: int = 0
    step: int = 0
    communication: int = 0
    allocator: int = 0
    stays: int = 0
    released: int = 0
    host: int = 0
    mapped: int = 0
    forward: int = 0

    @property
    def states(self) -> int:
        """What is needed however short the samples are."""
        return self.lasting + max(self.step, self.communication + self.released)

    @property
    def total(self) -> int:
        """The peak, on the longest samples: of a pass, of a step, or of what ranks exchange."""
        row = self.activations + self.logits
        passing = max(row - self.stays, self.communication) + self.released
        return self.lasting + self.stays + self.allocator + max(passing, self.step)

    @property
    def lasting(self) -> int:
        """Memory between passes, all weights of a pass included."""
        weights = self.weights + self.gathered
        return weights + self.gradients - self.released + self.optimizer

    def parts(self) -> dict[str, int]:
        """Bytes by name; not all there at the same time, so that `total` is less than their sum."""
        return {name: getattr(self, name) for name in _PARTS if getattr(self, name)}


def estimate(
    config: Mapping[str, Any],
    settings: Settings,
    world_size: int,
    *,
    gpu: bool = False,
    critic: bool = False,
) -> MemoryEstimate:
    """Peak memory of one of `world_size` ranks for one model.

    Args:
        config: contents of the base's `config.json`.
        settings: what is trained and how.
        world_size: ranks.
        gpu: whether it computes on one. A CPU keeps attention's probabilities of short sequences,
            computes 16-bit products through fp32, and allocates as described above.
        critic: whether it is the separate critic of a policy with these settings: it has the
            policy's output head and does not train it.

    Raises:
        KeyError: an architecture that names its dimensions differently.
    """
    sizes, zero, item = Sizes.of(config), settings.zero, ITEM[settings.dtype]
    logits = not critic and settings.objective != "reward"
    headless = sizes if logits else replace(sizes, tied=True)  # a score head is a vector
    sizes = sizes if critic else headless
    trained = trained_weights(headless, settings)
    shared = {stage: world_size if zero.stage >= stage else 1 for stage in (1, 2, 3)}
    held = _held(sizes, settings, gpu=gpu) / shared[3]
    gathered = min(sizes.weights(), _MAX_LIVE) * item if shared[3] > 1 else 0
    row = row_bytes(sizes, settings, item=item, gpu=gpu, logits=logits)
    in_heap = gathered if _layer_weight(sizes, item) <= LARGEST_IN_HEAP else 0
    mine = trained / shared[1]
    offloaded = zero.offload_optimizer == "cpu"
    at_once = mine if zero.stage < 3 else min(mine, _SUB_GROUP)
    states, step = mine * _optimizer_bytes(settings), at_once * _step_bytes(settings)
    if offloaded:
        states += mine * item  # the updated weights, before they are copied to where they are used
    gradients = int(trained * item / shared[2] + _bucket(settings, trained))
    away = (states + step if offloaded else 0) + (held if zero.offload_param == "cpu" else 0)
    return MemoryEstimate(
        weights=int(0 if gpu and zero.offload_param == "cpu" else held),
        gathered=gathered,
        gradients=gradients,
        optimizer=int(0 if gpu and offloaded else states),
        activations=row.small + row.large - row.logits,
        logits=row.logits,
        step=int(0 if gpu and offloaded else step),
        communication=int(_communication(settings, trained, gathered, world_size, gpu=gpu)),
        allocator=0 if gpu else int(_holes(row, in_heap)),
        stays=0 if gpu else row.small,
        # Stages 1 and 2 take gradients over into fp32 before they step; the others hold on to them.
        released=gradients if zero.stage in (1, 2) else 0,
        host=int(away) if gpu else 0,
        mapped=0 if gpu else int(_mapped(sizes, settings)),
        forward=row.forward,
    )


def trained_weights(sizes: Sizes, settings: Settings) -> int:
    """How many weights are trained."""
    full = settings.peft.kind == "none"
    return sizes.weights() if full else adapter_weights(sizes, settings)


def _held(sizes: Sizes, settings: Settings, *, gpu: bool) -> float:
    """Bytes of all weights, before ZeRO-3 divides them."""
    peft, item = settings.peft, ITEM[settings.dtype]
    linear = item if peft.kind != "qlora" else 0.5 + _SCALE_BYTES[peft.double_quant]
    held = sizes.linear_weights() * linear + sizes.other_weights() * item
    if peft.kind != "none":
        held += adapter_weights(sizes, settings) * item
    if peft.kind == "qlora" and not gpu:
        # The file that was quantised stays mapped as long as one of its tensors is in use.
        held += sizes.weights() * item
    return held


def _mapped(sizes: Sizes, settings: Settings) -> int:
    """Bytes of a CPU's weights that are the base's file, which ranks share: under QLoRA alone.

    Other weights become each rank's own: DeepSpeed writes rank 0's into those of all other ranks
    when it starts (`_broadcast_model`), the mapping is private, and ZeRO-3 makes partitions.
    """
    return sizes.weights() * ITEM[settings.dtype] if settings.peft.kind == "qlora" else 0


def _layer_weight(sizes: Sizes, item: int) -> int:
    """Bytes of a layer's largest weight."""
    return max(i * o for i, o in sizes.linears().values()) * item


def _holes(row: RowBytes, gathered: int) -> float:
    """Bytes of a CPU's heap that are free and resident, with `gathered` bytes of weights in it."""
    passing = LEFT_BY_LAYERS * row.recomputed if row.recomputed else HOLES * row.small
    return passing + HOLES * gathered


def _bucket(settings: Settings, trained: int) -> int:
    """Bytes that gradients are reduced in."""
    bucket = min(trained, settings.zero.bucket_size) if settings.zero.stage else 0
    return bucket * ITEM[settings.dtype]


def _communication(
    settings: Settings, trained: int, gathered: int, ranks: int, *, gpu: bool
) -> float:
    """Flat buffers of collectives at their largest.

    ZeRO-3 asks for weights ahead, one bucket after the other until `_MAX_LIVE` are on their way,
    each in a flat buffer out of which the weights are then copied.
    """
    item, zero = ITEM[settings.dtype], settings.zero
    if ranks == 1:
        return 0
    if zero.stage == 0:
        return min(trained, _ALLREDUCE) * item
    if zero.stage < 3:
        return _bucket(settings, trained)
    copies = 0 if gpu else min(gathered, _GLOO_THREADS * zero.bucket_size * item)
    return max(gathered + copies, 2 * _bucket(settings, trained))


def _optimizer_bytes(settings: Settings) -> float:
    """Of one weight: the fp32 master copy where weights have 16 bits, and two moments."""
    master = 0 if settings.dtype == "float32" else 4
    moments = 8.0 if settings.optim.optimizer == "adamw" else 2 * (1 + 4 / 256)
    return master + moments


def _step_bytes(settings: Settings) -> int:
    """Of one weight in the optimizer's step: its gradient in fp32; and from stage 1 on, where all
    weights of a rank are one flat tensor, the second moment's root and the root over its bias,
    which torch's AdamW holds at the same time. The 8-bit and the offloaded one work in place.
    """
    in_place = settings.optim.optimizer != "adamw" or settings.zero.offload_optimizer == "cpu"
    return 4 if in_place or settings.zero.stage == 0 else 12


def adapter_weights(sizes: Sizes, settings: Settings, *, tables: bool = True) -> int:
    """Trained weights of an adapter: pairs, magnitudes, and modules that are saved whole unless
    `tables` leaves those out.

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
    whole = sum(name in ("embed_tokens", "lm_head") for name in peft.modules_to_save)
    return sizes.layers * layer + (whole * sizes.vocab * sizes.hidden if tables else 0)
