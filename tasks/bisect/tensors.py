"""Compare two tensors: equal, rounded to a format, or different; and name the likely cause.

Rounding leaves errors that are within half a step of the format, fill that range evenly and do not
depend on the sign of the weight. They have no direction in common either, so that an adapter's
change stands out although each of its numbers is smaller than a step. A trained change, a scale or
another tensor breaks at least one of the four. The rules are tried on some rows, and the one that
fits is then checked on all of them.

A cause is a sentence about b's tensor: transposed, scaled, zero, another tensor of a, heads in
another order, an adapter on one side only. `cause_of` returns the first that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tasks.bisect.report import AUDIT, MERGE, REDO, TensorGap

CHUNK = 1 << 24
"""Numbers that are compared at once."""
SAMPLE = 256
"""Rows on which formats are tried."""
WITHIN = 0.995
"""Share of the numbers that must be within the steps of a format."""
GROSS = 3.0
"""Errors above this many times what a format allows are no rounding, however few they are: one row
of a large matrix."""
NEGLIGIBLE = 0.01
"""Share of a block's largest value below which an error is not gross, as of numbers near zero."""
CORRELATED = 0.3
"""Largest correlation of rounding errors with the weights."""
STORED = 2.0**-8
"""Relative error of a rounded number that is stored in bfloat16."""
SMALL = 0.1
"""Share of a row's largest value up to which a sum is small: an adapter's change that was rounded
before it was added leaves larger errors in small sums than their own rounding."""
EVEN = (0.2, 0.4)
"""Root mean square of rounding errors in steps of the format; 0.289 if they are even."""

STRUCTURED = 1.2
"""Largest ratio of the errors' strongest direction to that with random signs. Rounding gives
1.05 on matrices of `SIDE`, and less on larger ones."""
SIDE = 128
"""Rows and columns from which on that ratio means something."""
ROWS = 2048
"""Rows that it is measured on."""


def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorGap:
    """Compare two tensors of any floating dtype."""
    shape = tuple(a.shape)
    if a.shape != b.shape:
        return TensorGap(name, shape, problem=f"shape {list(a.shape)}, not {list(b.shape)}")
    if a.dtype == b.dtype and torch.equal(a, b):
        return TensorGap(name, shape)
    largest = squares = lengths = 0.0
    differing = strange = 0
    for part_a, part_b in _chunks(a, b):
        gap = (part_a - part_b).abs()
        strange += int((~part_b.isfinite()).sum())
        differing += int((part_a != part_b).sum())
        gap = gap.nan_to_num(0.0, 0.0, 0.0)
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
        squares += float(gap.square().sum())
        lengths += float(part_a.square().sum())
    if not differing:
        return TensorGap(name, shape)
    relative = float("inf") if lengths == 0 else (squares / lengths) ** 0.5
    problem = f"{strange} elements of b are NaN or infinite" if strange else ""
    rounding = "" if strange else _format(a, b)
    return TensorGap(name, shape, largest, relative, differing / a.numel(), rounding, problem)


def _chunks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both tensors in fp32, as matrices of some rows at a time."""
    rows_a, rows_b = _matrix(a), _matrix(b)
    count = max(1, CHUNK // max(rows_a.shape[-1], 1))
    for part_a, part_b in zip(rows_a.split(count), rows_b.split(count), strict=True):
        yield part_a.float(), part_b.to(part_a.device).float()


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(a, largest absolute value of the block) -> step of the format, at each element of a."""
_PLAIN: Mapping[str, Step] = {
    "bfloat16": lambda a, top: _binade(a, 7, 2.0**-126),
    "float16": lambda a, top: _binade(a, 10, 2.0**-14),
}
"""Formats without scales. Twice rounded is allowed: errors up to a whole step."""
_SCALED: Mapping[str, Step] = {
    "int8": lambda a, top: (top / 127).expand_as(a),
    "fp8 (e4m3)": lambda a, top: _float8(a, top),
    "4 bits": lambda a, top: (top / 7).expand_as(a),
    "nf4": lambda a, top: (top * 0.17).expand_as(a),
}
"""Formats in which a block of elements shares a scale; errors fill half a step evenly."""
_BLOCKS = (0, 128, 64, 32)
"""Elements of a row that share a scale; 0: the whole row."""


def _binade(values: torch.Tensor, bits: int, smallest: float) -> torch.Tensor:
    """Return the distance of neighbouring numbers with `bits` stored bits of mantissa."""
    exponents = torch.frexp(values.abs().clamp_min(smallest)).exponent - 1
    return torch.ldexp(torch.ones_like(values), exponents - bits)


def _float8(values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    scale = (top / 448).clamp_min(1e-30)
    return _binade(values / scale, 3, 2.0**-6) * scale


def _format(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the format whose rounding explains the differences of two tensors; "" if none does."""
    sample_a, sample_b = _some_rows(a, b, SAMPLE)
    width = sample_a.shape[-1]
    tried = [(name, step, 0, False) for name, step in _PLAIN.items()]
    for block in (block for block in _BLOCKS if not block or width % block == 0):
        tried += [(name, step, block, True) for name, step in _SCALED.items()]
    if width > 1:  # fp8 with one scale for the whole tensor
        whole = a.detach().abs().max().float()
        tried.append(("fp8 (e4m3)", lambda values, _: _float8(values, whole), 0, True))
    fitting = (
        name
        for name, step, block, scaled in tried
        if _is_small(sample_a, sample_b, step, block, scaled)
        if _is_even(sample_a, sample_b, step, block, scaled)
        if all(_is_small(*chunk, step, block, scaled) for chunk in _chunks(a, b))
    )
    name = next(fitting, "")
    return "" if name and _is_structured(a, b) else name


def _some_rows(a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return up to `count` rows of both tensors in fp32."""
    rows_a, rows_b = _matrix(a), _matrix(b)
    at = torch.linspace(0, len(rows_a) - 1, min(count, len(rows_a))).long()
    return rows_a[at].float(), rows_b[at].to(rows_a.device).float()


def _steps(a: torch.Tensor, b: torch.Tensor, step: Step, scaled: bool) -> torch.Tensor:
    """Return the steps of a format at each element; those of the larger side without scales."""
    top = a.abs().amax(dim=-1, keepdim=True)
    return step(a if scaled else torch.maximum(a.abs(), b.abs()), top).clamp_min(1e-38)


def _blocks(a: torch.Tensor, b: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (a.reshape(-1, block), b.reshape(-1, block)) if block else (a, b)


def _is_small(a: torch.Tensor, b: torch.Tensor, step: Step, block: int, scaled: bool) -> bool:
    """Return True if the differences are within the steps of a format."""
    a, b = _blocks(a, b, block)
    errors, top = (b - a).abs(), a.abs().amax(dim=-1, keepdim=True)
    steps = _steps(a, b, step, scaled)
    allowed = 0.56 * steps + STORED * a.abs() if scaled else 1.01 * steps + STORED * SMALL * top
    within = float((errors <= allowed).float().mean()) >= WITHIN
    return within and not (errors > torch.maximum(GROSS * allowed, NEGLIGIBLE * top)).any()


def _is_even(a: torch.Tensor, b: torch.Tensor, step: Step, block: int, scaled: bool) -> bool:
    """Return True if the differences fill the steps evenly, whatever the sign of the weight."""
    a, b = _blocks(a, b, block)
    errors = b - a
    size = float((errors / _steps(a, b, step, scaled)).square().mean().sqrt())
    if scaled and not EVEN[0] <= size <= EVEN[1]:
        return False
    by_chance = 2 / a.numel() ** 0.5
    product = abs(float((errors * a).sum()))
    return product <= (CORRELATED + by_chance) * float(errors.norm() * a.norm())


def _is_structured(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the differences have a direction in common, as those of an adapter have.

    The strongest direction of independent errors is as strong with random signs, however large the
    errors of single rows and columns are. A change of low rank is not.
    """
    some, other = _some_rows(a, b, ROWS)
    if min(some.shape) < SIDE:
        return False
    errors = other - some
    chance = torch.Generator().manual_seed(0)
    # Equal rows, as of tokens that were added, have equal errors: one of them is enough.
    keys = (some @ torch.randn(some.shape[1], generator=chance).to(some.device)).tolist()
    errors = errors[list({key: number for number, key in enumerate(keys)}.values())]
    if len(errors) < SIDE:
        return False
    signs = torch.randint(0, 2, errors.shape, generator=chance).to(errors.device) * 2 - 1
    start = torch.randn(errors.shape[1], 4, generator=chance).to(errors.device)
    return _strongest(errors, start) > STRUCTURED * _strongest(errors * signs, start)


def _strongest(errors: torch.Tensor, start: torch.Tensor) -> float:
    """Return the largest singular value of a matrix, by subspace iteration."""
    for _ in range(8):
        start = torch.linalg.qr(errors.T @ (errors @ start)).Q
    return float(torch.linalg.matrix_norm(errors @ start, 2))


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


Cause = tuple[str, str]
"""A likely cause, as a clause, and what to type."""


def cause_of(
    gap: TensorGap,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    others: Mapping[str, torch.Tensor],
) -> Cause:
    """Return the likely cause of a difference; b's values are looked for in `others` of a, too."""
    if gap.problem or a is None or b is None:
        return gap.problem, AUDIT
    a, b = a.detach().float(), b.detach().to(a.device).float()
    return next(_causes(gap, a, b, others))


def _causes(
    gap: TensorGap, a: torch.Tensor, b: torch.Tensor, others: Mapping[str, torch.Tensor]
) -> Iterator[Cause]:
    if not b.any():
        yield "b's tensor is zero: it was never written, or never loaded", REDO
    if not a.any():
        yield "a's tensor is zero, b's is not", AUDIT
    if b.dim() == 2 and b.shape[0] == b.shape[1] and _close(a.T, b):
        yield "b's tensor is a's, transposed", REDO
    scale = float((a * b).sum() / a.square().sum().clamp_min(1e-30))
    if scale and abs(scale - 1) > CLOSE and _close(a * scale, b):
        hint = "an adapter's scale (lora_alpha / r, rsLoRA), or a quantisation scale: " + AUDIT
        yield f"b's tensor is a's times {scale:.4g}", hint
    for name, other in others.items():
        if other.shape == b.shape and _close(other.to(b.device).float(), b):
            yield f"b's tensor is a's {name}: names are mixed up", REDO
    if a.dim() >= 2 and a.numel() <= LARGEST:
        blocks = (8, 16, 32, 64, 128, 256, *([1] if len(a) <= 4096 else []))
        if size := next((size for size in blocks if _is_reordered(a, b, size)), 0):
            text = (
                f"b's rows are a's in another order, in blocks of {size}: heads are swapped, or "
                "the layout of a fused layer or of the rotary halves is another one"
            )
            yield text, REDO
        if a.dim() == 2 and (rank := _rank(b - a)):
            text = f"the difference has rank {rank}: an adapter is in one of the two alone"
            yield text, MERGE
    similarity = float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-30))
    if abs(similarity) < 0.3 and a.numel() > 16:
        yield "b's tensor is unrelated to a's: that of another checkpoint, or a fresh one", REDO
    if gap.share < 0.5 and a.dim() >= 2:
        rows = (a != b).flatten(1).any(1).nonzero().flatten()
        if len(rows) < len(a) / 2:
            yield f"{len(rows)} of {len(a)} rows differ, from row {int(rows[0])} on", AUDIT
    if similarity > 0.9:
        yield "b was trained further, or is another step of the same training", AUDIT
    yield "other values", AUDIT


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= CLOSE * float(b.norm())


def _is_reordered(a: torch.Tensor, b: torch.Tensor, size: int) -> bool:
    """Return True if b consists of a's blocks of rows in another order."""
    if len(a) % size or len(a) == size:
        return False
    keys = [_keys(t.reshape(len(a) // size, -1)) for t in (a, b)]
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
    """Return a line for every key of two configurations that differs and may change an output."""
    lines: list[str] = []
    for key in sorted({*a, *b} - SILENT_KEYS):
        first, second = a.get(key), b.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            lines += config_changes(first, second, f"{prefix}{key}.")
        elif first != second:
            lines.append(f"{prefix}{key}: {first} in a, {second} in b")
    return lines
