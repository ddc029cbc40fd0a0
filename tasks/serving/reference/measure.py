"""Fingerprints of a loaded model.

Every sequence runs alone, without padding and without an attention mask, as the training engine
measures itself: only the same arithmetic gives the same bits. Token ids go to the device of the
model's embeddings, and results return to the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.core.errors import DriftError
from tasks.core.machine import measured_on
from tasks.drift.fingerprint import EXPERTS, Fingerprint, drift
from tasks.serving.reference.load import compute_in, input_device
from tasks.witness.plumbline_witness.measure import of_logits
from tasks.witness.plumbline_witness.prints import FormatNoise

COPIES = 8
"""Copies of a probe in one batch to measure repeat noise; a batch uses other kernels."""
LARGEST = 65504.0
"""Largest number of float16."""


@torch.no_grad()
def noise_of_formats(model: Any, measured: Fingerprint) -> dict[str, FormatNoise]:
    """Return the noise of each 16-bit format for a model; its weights are cast in place.

    A model that could not be computed in float32 has the noise of its own format alone, between
    two orders of summation.
    """
    dtype = _dtype(model)
    if dtype != "float32":
        with other_sums(model):
            return {dtype: drift(measured, fingerprint(model, measured, COPIES), dtype).noise}
    noise = {}
    fits = all(p.abs().max() <= LARGEST for p in model.parameters() if p.is_floating_point())
    for name in ("float16", "bfloat16") if fits else ("bfloat16",):
        compute_in(model, name)  # float16 has more bits, so that bfloat16 rounds the same values
        rounded = fingerprint(model, measured)
        if np.isfinite(rounded.logprobs).all():
            noise[name] = drift(measured, rounded, name).noise
    return noise


@contextlib.contextmanager
def other_sums(model: Any) -> Iterator[None]:
    """Make the model sum in another order inside, so that differences are rounding alone.

    Uses eager attention. Another batch size is not enough: on a CPU its sums are the same.
    """
    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def fingerprint(model: Any, reference: Fingerprint, copies: int = 1) -> Fingerprint:
    """Score the reference's probes at the reference's token ids; `copies` of each in a batch."""
    ends = np.cumsum([len(probe) - 1 for probe in reference.probes])[:-1]
    return _measured(model, reference.probes, np.split(reference.ids, ends), copies)


def reference(model: Any, probes: Sequence[Sequence[int]]) -> Fingerprint:
    """Return the fingerprint of a model at its own most likely token ids.

    For a model that our training did not measure.
    """
    return _measured(model, probes, [None] * len(probes))


@torch.no_grad()
def _measured(
    model: Any,
    probes: Sequence[Sequence[int]],
    wanted: Sequence[NDArray[np.int32] | None],
    copies: int = 1,
) -> Fingerprint:
    """Return a fingerprint at the wanted ids of each probe, (T-1, K); None: the most likely."""
    parts = []
    for probe, at in zip(probes, wanted, strict=True):
        batch = torch.tensor([list(probe)] * copies, device=input_device(model))
        logits = model(batch).logits[0, :-1].float()
        if at is not None and int(at.max()) >= logits.shape[-1]:
            raise DriftError(
                f"the model knows {logits.shape[-1]} tokens, the reference scores token "
                f"{at.max()}: the vocabulary shrank"
            )
        parts.append(of_logits(logits, at))
    ids, logprobs, top1, steps = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    config = model.config.get_text_config()
    return Fingerprint(
        probes=tuple(map(tuple, probes)),
        ids=ids,
        logprobs=logprobs,
        top1=top1,
        engine="transformers",
        steps=steps,
        measured_on=measured_on(input_device(model), model.config._attn_implementation),
        dtype=_dtype(model),
        routed=any((getattr(config, name, 0) or 0) > 1 for name in EXPERTS),
    )


def _dtype(model: Any) -> str:
    return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
