"""Measure log-probabilities, or a reward model's scores, of a live model.

Every rank of a sharded model (ZeRO-3, FSDP) has to call these functions with the same probes, since
each forward pass gathers the parameters. Nothing of the training changes: modes of modules and the
random state are restored, and no gradient is computed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TOP_K = 512
"""Ids per position. A smaller vocabulary is recorded completely."""
BATCH = 4
"""Probes per forward pass."""
_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
"""Significant bits of a number."""


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at the scored positions of all probes: a sequence of T ids has T-1.

    Attributes:
        ids: scored token ids, shape (N, K), int32: the most likely ones, and the probe's own next.
        logprobs: natural-log probabilities of these ids, shape (N, K), float32.
        top1: most likely token, shape (N,), int32.
        steps: distance of neighbouring numbers in the dtype of the logits, at the largest logit
            (nats), shape (N,), float32.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    top1: np.ndarray
    steps: np.ndarray


def measure_logprobs(
    model: Any,
    probes: Sequence[Sequence[int]],
    *,
    at: np.ndarray | None = None,
    batch: int = BATCH,
) -> Logprobs:
    """Return the log-probabilities of probes.

    Args:
        model: causal language model; called with `input_ids` and `attention_mask`.
        probes: token-id sequences.
        at: ids to score, shape (N, K); None for the most likely ones.
        batch: sequences per forward pass.
    """
    parts: list[Logprobs] = []
    start = 0
    for chunk in _chunks(probes, batch):
        logits = forward(model, chunk)
        for row, ids in zip(logits, chunk):
            count = len(ids) - 1
            scored = None if at is None else at[start : start + count]
            parts.append(_of_one(row[:count], ids, scored))
            start += count
    names = ("ids", "logprobs", "top1", "steps")
    return Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def measure_scores(
    model: Any, probes: Sequence[Sequence[int]], *, batch: int = BATCH
) -> list[float]:
    """Return one score per probe, of a model with a head of one output."""
    scores: list[float] = []
    for chunk in _chunks(probes, batch):
        scores += [float(row.reshape(-1)[0]) for row in forward(model, chunk).float().cpu()]
    return scores


def forward(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the logits of a batch, padded on the right: (B, T, V), or (B, 1) of a reward model."""
    device = next(model.parameters()).device
    longest = max(map(len, sequences))
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None) or 0
    rows = [[*ids, *([pad] * (longest - len(ids)))] for ids in sequences]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
    out = model(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device),
    )
    logits = out.logits if hasattr(out, "logits") else out[0]
    return logits.detach()


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


def _chunks(probes: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    for start in range(0, len(probes), size):
        yield probes[start : start + size]


def _of_one(logits: torch.Tensor, ids: Sequence[int], at: np.ndarray | None) -> Logprobs:
    """Return the log-probabilities of one probe, from its logits of shape (T-1, V)."""
    precise = logits.float()
    logprobs = torch.log_softmax(precise, -1)
    if at is None:
        scored = _most_likely(logprobs, torch.tensor(ids[1:], device=logits.device))
    else:
        scored = torch.tensor(at.astype(np.int64), device=logits.device)
    return Logprobs(
        scored.cpu().numpy().astype(np.int32),
        logprobs.gather(1, scored).cpu().numpy().astype(np.float32),
        precise.argmax(-1).cpu().numpy().astype(np.int32),
        _steps(precise),
    )


def _most_likely(logprobs: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the ids to score: the top K, the last of which gives way to a missing next token."""
    size = logprobs.shape[-1]
    if size <= TOP_K:
        return torch.arange(size, device=logprobs.device).expand(len(logprobs), size)
    top = logprobs.topk(TOP_K, dim=-1).indices
    missing = ~(top == following[:, None]).any(-1)
    top[missing, -1] = following[missing]
    return top


def _steps(logits: torch.Tensor) -> np.ndarray:
    """Return the distance of neighbouring numbers at the largest logit of each position.

    The dtype is inferred from the values, since mixed precision returns 16-bit logits as 32 bit.
    """
    if not bool((logits.view(torch.int32) & 0xFFFF).any()):
        dtype = torch.bfloat16
    elif torch.equal(logits.half().float(), logits):
        dtype = torch.float16
    else:
        dtype = torch.float32
    largest = np.abs(logits.amax(-1).cpu().numpy().astype(np.float64))
    exponents = np.frexp(largest)[1] - _BITS[dtype]
    return np.where(largest == 0, 2.0**-133, np.ldexp(1.0, exponents)).astype(np.float32)
