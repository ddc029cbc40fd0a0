"""Model FLOPs utilisation (MFU): FLOPs of a step over the peak FLOPs of the devices in its time.

Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311, appendix
B: 6 N FLOPs per token for N weights (2 N forward, 2 N for the gradients of activations, 2 N for
those of weights), and 12 L H Q T for attention's two products over sequences of T tokens, without a
discount for causality. Five things differ from the formula:

    frozen weights   4 N, since they have no gradients. LoRA costs 4 N for the base and 6 per weight
                     of its own.
    packed rows      T is the length of each sequence, since attention stays within it.
    output head      counts only for supervised tokens; no others pass through it.
    experts          N counts those that a token passes through.
    embedding        does not count; it is a lookup.

Recomputed activations do not count (they would in hardware utilisation), nor do passes without
gradients: the reference, KTO's baseline.
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
"""Peak FLOP/s of dense 16-bit products with fp32 sums, by words of the device's name; the first
match counts. From NVIDIA's data sheets (their figures "with sparsity" are twice these) as quoted by
torchtitan's `get_peak_flops`. None marks a variant whose peak is not known."""
_SIXTEEN_BITS = ("bfloat16", "float16")


def peak_of(device: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device, or None if it is not known.

    It is None for fp32, whose peak depends on torch's TF32 setting.

    Args:
        device: result of `torch.cuda.get_device_name`.
        dtype: name of a torch dtype.
    """
    if dtype not in _SIXTEEN_BITS:
        return None
    words = f" {device} ".replace("-", " ")
    return next((peak for name, peak in PEAKS if f" {name} " in words), None)


def step_flops(sizes: Sizes, settings: Settings, counts: Counts) -> float:
    """Return the FLOPs of one optimizer step, forward and backward, on all ranks together.

    Args:
        sizes: dimensions of the model.
        settings: settings of the run.
        counts: totals of the step.
    """
    peft, linear = settings.peft, sizes.linear_weights() + sizes.expert_weights(active=True)
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
    """Computes the MFU of steps.

    Attributes:
        sizes: dimensions of the model.
        settings: settings of the run.
        peak: peak FLOP/s of all ranks' devices together.
    """

    sizes: Sizes
    settings: Settings
    peak: float

    def mfu(self, counts: Counts, seconds: float) -> float:
        """Return the MFU of a step that took `seconds`, 0 to 1."""
        return step_flops(self.sizes, self.settings, counts) / seconds / self.peak


def meter(job: TrainJob, ranks: Ranks) -> Meter | None:
    """Return a meter for this job and its devices, or None if the MFU cannot be computed.

    That is so on CPUs, on devices without a known peak, and for unknown architectures.
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
