"""Measure log-probabilities, or a reward model's scores, of a live model.

Every rank of a sharded model (ZeRO-3, FSDP) has to call these functions with the same probes, since
each forward pass gathers the parameters. Nothing of the training changes: modes of modules and the
random state are restored, and no gradient is computed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from .prints import TOP_K, Fingerprint, largest_steps

BATCH = 4
"""Probes per forward pass."""


def measure_logprobs(
    model: Any, probes: Sequence[Sequence[int]], *, at: np.ndarray | None = None
) -> Fingerprint:
    """Return the fingerprint of a causal language model.

    `at` are the ids to score, shape (N, K); by default the most likely ones and the probe's own
    next token.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    start = 0
    for logits, ids in forward(model, probes, BATCH):
        end = start + len(ids) - 1
        following = torch.tensor(ids[1:], device=logits.device)
        wanted = None if at is None else at[start:end]
        parts.append(of_logits(logits[:-1].float(), wanted, following))
        start = end
    ids, logprobs, top1, steps = (np.concatenate(arrays) for arrays in zip(*parts))
    sequences = tuple(map(tuple, probes))
    return Fingerprint(sequences, ids, logprobs, top1, engine="trainer", steps=steps)


def measure_scores(
    model: Any, probes: Sequence[Sequence[int]], *, batch: int = BATCH
) -> list[float]:
    """Return one score per probe, of a model with a head of one output."""
    return [float(row.float().reshape(-1)[0]) for row, _ in forward(model, probes, batch)]


def forward(
    model: Any, probes: Sequence[Sequence[int]], batch: int
) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Yield each probe's logits and ids, in batches padded on the right.

    The logits have shape (T, V), or (1,) of a reward model.
    """
    device = next(model.parameters()).device
    pad = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    for start in range(0, len(probes), batch):
        chunk = probes[start : start + batch]
        rows = pad_sequence([torch.tensor(ids) for ids in chunk], True, pad)
        mask = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids in chunk], True)
        out = model(input_ids=rows.to(device), attention_mask=mask.to(device))
        logits = out.logits if hasattr(out, "logits") else out[0]
        for row, ids in zip(logits.detach(), chunk):
            yield (row[: len(ids)] if row.dim() > 1 else row), ids


@contextlib.contextmanager
def other_rounding(model: torch.nn.Module, embeddings: torch.nn.Module) -> Iterator[str]:
    """Compute in 16 bits with other rounding errors of the same size. Yields the dtype's name.

    Embeddings are moved by one rounding step. What changes is what changes between two engines that
    compute the same weights in that format.
    """
    halves = embeddings.weight.dtype == torch.float16
    dtype = torch.float16 if halves else torch.bfloat16
    step = torch.finfo(dtype).eps

    def move(module: torch.nn.Module, arguments: Any, out: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, out.shape, device=out.device) * 2 - 1
        return (out * (1 + step * signs)).to(out.dtype)

    handle = embeddings.register_forward_hook(move)
    try:
        with torch.autocast(next(model.parameters()).device.type, dtype):
            yield str(dtype).removeprefix("torch.")
    finally:
        handle.remove()


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Switch to evaluation without gradients, and restore modes and random state afterwards.

    In evaluation on a CPU, 4-bit layers of bitsandbytes repack their weights for good, with other
    scales and without gradients; this is switched off meanwhile.
    """
    training = [module for module in model.modules() if module.training]
    repacking = [module for module in model.modules() if getattr(module, _REPACKS, False)]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    before = os.environ.get(_UNSLOTH)
    os.environ[_UNSLOTH] = "1"
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            for module in repacking:
                setattr(module, _REPACKS, False)
            yield
    finally:
        for module in repacking:
            setattr(module, _REPACKS, True)
        for module in training:
            module.training = True
        if before is None:
            os.environ.pop(_UNSLOTH)
        else:
            os.environ[_UNSLOTH] = before


_REPACKS = "support_avx512bf16_for_cpu"
_UNSLOTH = "UNSLOTH_RETURN_LOGITS"
"""Without it, models that unsloth has patched return no logits."""


def of_logits(
    logits: torch.Tensor, at: np.ndarray | None = None, following: torch.Tensor | None = None
) -> tuple[np.ndarray, ...]:
    """Return ids, log-probabilities, top tokens and steps of logits (T, V) in float32.

    `at` are the ids to score, shape (T, K); by default the most likely ones. The last of these
    gives way to a missing token of `following`, shape (T,).
    """
    logprobs, size = torch.log_softmax(logits, -1), logits.shape[-1]
    if at is not None:
        scored = torch.tensor(at.astype(np.int64), device=logits.device)
    elif size <= TOP_K:
        scored = torch.arange(size, device=logits.device).expand(len(logits), size)
    else:
        scored = logprobs.topk(TOP_K, dim=-1).indices
        if following is not None:
            missing = ~(scored == following[:, None]).any(-1)
            scored[missing, -1] = following[missing]
    return (
        scored.cpu().numpy().astype(np.int32),
        logprobs.gather(1, scored).cpu().numpy().astype(np.float32),
        logits.argmax(-1).cpu().numpy().astype(np.int32),
        largest_steps(logits.cpu().numpy()),
    )
