"""Name the likely cause of a difference, and what to type.

A cause is a sentence about b's tensor: transposed, scaled, zero, another tensor of a, heads in
another order, an adapter on one side only. `cause_of` returns the first that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tasks.bisect.tensors import TensorGap

CLOSE = 0.02
"""Relative distance at which two tensors are the same, but for rounding."""
LOW_RANK = 64
"""Largest rank of an adapter's change."""
LARGEST = 1 << 26
"""Numbers of a tensor up to which its rank and its order of heads are looked at."""
SILENT_KEYS = frozenset(
    ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "torch_dtype",
     "tokenizer_class", "problem_type", "id2label", "label2id", "pad_token_id", "bos_token_id",
     "eos_token_id", "return_dict", "output_hidden_states", "output_attentions")
)  # fmt: skip
"""Keys of config.json that change no hidden state."""


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        text: the cause, as a clause.
        hint: what to type or to do.
    """

    text: str
    hint: str = ""


AUDIT = "audit b against a"
"""Replaced by the command, with the folders (`run.py`)."""
REDO = "make b's folder again from its source: python flows/deliver.py <source> out=<folder>"


def cause_of(
    gap: TensorGap, a: torch.Tensor, b: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> Cause:
    """Return the likely cause of a difference between two tensors.

    Args:
        gap: their comparison.
        a: tensor of a.
        b: tensor of b.
        others: other tensors of a by name, to look for b's values in.
    """
    if gap.problem:
        return Cause(gap.problem, AUDIT)
    a, b = a.detach().float(), b.detach().to(a.device).float()
    for cause in _causes(gap, a, b, others):
        return cause
    return Cause("other values", AUDIT)


def _causes(
    gap: TensorGap, a: torch.Tensor, b: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> Iterator[Cause]:
    if not b.any():
        yield Cause("b's tensor is zero: it was never written, or never loaded", REDO)
    if not a.any():
        yield Cause("a's tensor is zero, b's is not", AUDIT)
    if b.dim() == 2 and b.shape[0] == b.shape[1] and _close(a.T, b):
        yield Cause("b's tensor is a's, transposed", REDO)
    scale = float((a * b).sum() / a.square().sum().clamp_min(1e-30))
    if scale and abs(scale - 1) > CLOSE and _close(a * scale, b):
        hint = "an adapter's scale (lora_alpha / r, rsLoRA), or a quantisation scale: " + AUDIT
        yield Cause(f"b's tensor is a's times {scale:.4g}", hint)
    for name, other in others.items():
        if other.shape == b.shape and _close(other.to(b.device).float(), b):
            yield Cause(f"b's tensor is a's {name}: names are mixed up", REDO)
    if a.dim() >= 2 and a.numel() <= LARGEST:
        yield from _of_matrix(a, b)
    similarity = float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-30))
    if abs(similarity) < 0.3 and a.numel() > 16:
        text = "b's tensor is unrelated to a's: that of another checkpoint, or a fresh one"
        yield Cause(text, REDO)
    if gap.share < 0.5 and a.dim() >= 2:
        rows = (a != b).flatten(1).any(1).nonzero().flatten()
        if len(rows) < len(a) / 2:
            yield Cause(f"{len(rows)} of {len(a)} rows differ, from row {int(rows[0])} on", AUDIT)
    if similarity > 0.9:
        yield Cause("b was trained further, or is another step of the same training", AUDIT)


def _of_matrix(a: torch.Tensor, b: torch.Tensor) -> Iterator[Cause]:
    blocks = next((n for n in (8, 16, 32, 64, 128, 256) if _is_reordered(a, b, n)), 0)
    if blocks:
        yield Cause(
            f"b's rows are a's in another order, in blocks of {blocks}: heads are swapped, or the "
            "layout of a fused layer is another one",
            REDO,
        )
    elif len(a) <= 4096 and _rows_reordered(a, b):
        text = "b's rows are a's in another order: the rotary layout (halves, interleaved) differs"
        yield Cause(text, REDO)
    rank = _rank(b - a) if a.dim() == 2 else 0
    if rank:
        text = (
            f"the difference has rank {rank}: an adapter is in one of the two and not in the other"
        )
        yield Cause(text, "merge it: python flows/deliver.py <adapter> base=<folder> out=<folder>")


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= CLOSE * float(b.norm())


def _is_reordered(a: torch.Tensor, b: torch.Tensor, size: int) -> bool:
    """Return True if b consists of a's blocks of rows in another order."""
    if len(a) % size or len(a) == size:
        return False
    keys = [_keys(t.reshape(len(a) // size, -1)) for t in (a, b)]
    return keys[0] != keys[1] and sorted(keys[0]) == sorted(keys[1])


def _rows_reordered(a: torch.Tensor, b: torch.Tensor) -> bool:
    keys = [_keys(t.reshape(len(a), -1)) for t in (a, b)]
    return keys[0] != keys[1] and sorted(keys[0]) == sorted(keys[1])


def _keys(rows: torch.Tensor) -> list[tuple[float, float]]:
    """Return a key of each row; equal rows have equal keys."""
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device) / rows.shape[1]
    sums = (rows.double() * weights).sum(1), rows.double().square().sum(1)
    return [(round(x, 6), round(y, 6)) for x, y in zip(*(s.tolist() for s in sums), strict=True)]


def _rank(difference: torch.Tensor) -> int:
    """Return the rank of a difference if it is low, but for rounding; else 0."""
    most = min(difference.shape) // 2
    count = min(LOW_RANK, most)
    if count < 1:
        return 0
    values = torch.svd_lowrank(difference, q=min(count + 8, min(difference.shape)), niter=4)[1]
    total = float(difference.square().sum())
    covered = values[:count].square().cumsum(0) / max(total, 1e-30)
    enough = (covered >= 0.97).nonzero()
    return int(enough[0]) + 1 if len(enough) else 0


def config_changes(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return a line for every key of config.json that differs and may change a hidden state.

    Args:
        a: configuration of a, with the defaults of its class.
        b: that of b.
        prefix: name of the section, with a dot.
    """
    lines: list[str] = []
    for key in sorted({*a, *b} - SILENT_KEYS):
        first, second = a.get(key), b.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            lines += config_changes(first, second, f"{prefix}{key}.")
        elif first != second:
            lines.append(f"{prefix}{key}: {first} in a, {second} in b")
    return lines
