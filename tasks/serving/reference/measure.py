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

from tasks.core.errors import DriftError
from tasks.core.machine import measured_on
from tasks.drift.fingerprint import EXPERTS, Fingerprint, drift
from tasks.serving.reference.load import compute_in, input_device
from tasks.witness.plumbline_witness.prints import TOP_K, FormatNoise, largest_steps

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


@torch.no_grad()
def fingerprint(model: Any, reference: Fingerprint, copies: int = 1) -> Fingerprint:
    """Score the reference's probes at the reference's token ids; `copies` of each in a batch."""
    logprobs, top1, steps = [], [], []
    start = 0
    for probe in reference.probes:
        logits = _logits(model, probe, copies)
        ids = torch.from_numpy(reference.ids[start : start + len(probe) - 1].astype(np.int64))
        if int(ids.max()) >= logits.shape[-1]:
            raise DriftError(
                f"the model knows {logits.shape[-1]} tokens, the reference scores "
                f"token {int(ids.max())}: the vocabulary shrank"
            )
        at_ids = torch.log_softmax(logits, dim=-1).gather(1, ids.to(logits.device))
        logprobs.append(at_ids.cpu().numpy())
        top1.append(logits.argmax(dim=-1).cpu().numpy())
        steps.append(largest_steps(logits.cpu().numpy()))
        start += len(probe) - 1
    return Fingerprint(
        probes=reference.probes,
        ids=reference.ids,
        logprobs=np.concatenate(logprobs).astype(np.float32),
        top1=np.concatenate(top1).astype(np.int32),
        engine="transformers",
        steps=np.concatenate(steps),
        **_facts(model),
    )


def _logits(model: Any, probe: Sequence[int], copies: int = 1) -> torch.Tensor:
    """Return the logits of all positions but the last, (T-1, V) float32, of the first copy."""
    ids = torch.tensor([list(probe)] * copies, device=input_device(model))
    out = model(ids).logits
    logits: torch.Tensor = out[0, :-1].float()
    return logits


def _dtype(model: Any) -> str:
    return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")


def _facts(model: Any) -> dict[str, Any]:
    """Return the fields of a fingerprint that do not depend on the probes."""
    config = model.config.get_text_config()
    return {
        "measured_on": measured_on(input_device(model), model.config._attn_implementation),
        "dtype": _dtype(model),
        "routed": any((getattr(config, name, 0) or 0) > 1 for name in EXPERTS),
    }


@torch.no_grad()
def reference(model: Any, probes: Sequence[Sequence[int]]) -> Fingerprint:
    """Return the fingerprint of a model at its own most likely token ids.

    For a model that our training did not measure.
    """
    logits = [_logits(model, probe).cpu() for probe in probes]
    logprobs = torch.log_softmax(torch.cat(logits), dim=-1)
    ids = logprobs.topk(min(TOP_K, logprobs.shape[-1]), dim=-1).indices
    return Fingerprint(
        probes=tuple(tuple(probe) for probe in probes),
        ids=ids.to(torch.int32).numpy(),
        logprobs=logprobs.gather(1, ids).numpy(),
        top1=logprobs.argmax(dim=-1).to(torch.int32).numpy(),
        engine="transformers",
        steps=np.concatenate([largest_steps(rows.numpy()) for rows in logits]),
        **_facts(model),
    )
