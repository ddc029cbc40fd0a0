"""Model FLOPs utilisation: what a step has to compute, over what the devices could in its time.

After Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311,
appendix B: 6 N FLOPs a token for N weights that multiply (2 N forward, 2 N for the gradients of
activations, 2 N for those of weights), and 12 L H Q T for attention's two products over sequences
of T tokens, causality not taken off. Four things differ from the formula's letter:

    frozen weights   4 N: nobody asks for their gradients. So LoRA takes 4 N of the base and 6 of
                     each of its own weights.
    packed rows      T is each sequence's own length, since attention stays within it.
    the output head  counts on the tokens that bear loss: no others go through it.
    the embedding    is looked up and multiplies nothing.

What is computed twice to save memory does not count (that would be the hardware's utilisation), nor
do passes without a gradient: a reference, KTO's baseline.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Settings, TrainJob
from tasks.training.memory.estimate import adapter_weights
from tasks.training.memory.sizes import Sizes
from tasks.training.tokens.order import Counts

PEAKS: tuple[tuple[str, float | None], ...] = (
    ("B200", 2250e12),
    ("H200 NVL", None),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 150e12),
    ("L40S", 362e12),
    ("L4", 121e12),
)
"""FLOPs a second of dense 16-bit products with fp32 sums, by words of the device's name; the first
that fits. NVIDIA's data sheets, whose figures "with sparsity" are twice these, as torchtitan's
`get_peak_flops` and public tables of specifications quote them; what could not be found there is
left out, and None keeps a variant from being taken for another."""
_SIXTEEN_BITS = ("bfloat16", "float16")


def peak_of(device: str, dtype: str) -> float | None:
    """FLOPs a second of a device at best; None where it is not known.

    fp32 has none: whether its products go through TF32 is a setting of torch's.

    Args:
        device: its name, as `torch.cuda.get_device_name` says it.
        dtype: torch dtype name.
    """
    if dtype not in _SIXTEEN_BITS:
        return None
    words = f" {device} ".replace("-", " ")
    return next((peak for name, peak in PEAKS if f" {name} " in words), None)


def step_flops(sizes: Sizes, settings: Settings, counts: Counts) -> float:
    """FLOPs of one optimizer step, forward and backward, of all ranks together.

    Args:
        sizes: of the model.
        settings: what is trained.
        counts: what the step is over.
    """
    peft, linear = settings.peft, sizes.linear_weights()
    head = 0 if settings.objective == "reward" else sizes.vocab * sizes.hidden
    attention = 12 * sizes.layers * sizes.query * counts.squares
    if peft.kind == "none":
        return 6.0 * (linear * counts.tokens + head * sum(counts.supervised)) + attention
    of_head = 6 if "lm_head" in peft.modules_to_save else 4
    pairs = adapter_weights(sizes, settings, tables=False)
    return (
        (4.0 * linear + 6.0 * pairs) * counts.tokens
        + of_head * head * sum(counts.supervised)
        + attention
    )


@dataclass(frozen=True)
class Meter:
    """Measures steps.

    Attributes:
        sizes: of the model.
        settings: what is trained.
        peak: FLOPs a second of all ranks' devices together.
    """

    sizes: Sizes
    settings: Settings
    peak: float

    def mfu(self, counts: Counts, seconds: float) -> float:
        """Share of the peak that a step of so many seconds has made use of, 0 to 1."""
        return step_flops(self.sizes, self.settings, counts) / seconds / self.peak


def meter(job: TrainJob, ranks: Ranks) -> Meter | None:
    """A meter for this job on these devices; None where there is nothing to compare with: on a CPU,
    on a device without a known peak, for a model that names its dimensions differently.
    """
    if ranks.device.type != "cuda":
        return None
    import torch

    peak = peak_of(torch.cuda.get_device_name(ranks.device), job.settings.dtype)
    if peak is None:
        return None
    try:
        sizes = Sizes.of(json.loads((job.base / "config.json").read_text(encoding="utf-8")))
    except KeyError:
        return None
    return Meter(sizes, job.settings, peak * ranks.world_size)
