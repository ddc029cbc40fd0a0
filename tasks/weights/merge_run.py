"""Running a merge plan: one tensor at a time from the mapped base to its final place.

Peak memory is a few copies of the largest tensor, whatever the size of the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.weights import bits
from tasks.weights.merge_plan import MergeOp, MergePlan
from tasks.weights.reader import ADAPTER, DTYPE_NAMES, Checkpoint, open_checkpoint, torch_dtype
from tasks.weights.writer import CheckpointWriter, Spec

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 5 * 10**9


@dataclass
class MergeResult:
    """What running a plan found.

    Attributes:
        sha256: of every output tensor, taken while it was written.
        changed: fraction of elements that folding changed, by targeted tensor.
        nonfinite: number of NaN or infinite elements, by tensor; only tensors that have any.
        quantization_error: `|W - W4|_F / |delta|_F` by targeted tensor that training quantised.
        overall_error: the same over all of them together; None without quantisation.
    """

    sha256: dict[str, str] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)
    quantization_error: dict[str, float] = field(default_factory=dict)
    overall_error: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass
class _Norms:
    """Squared Frobenius norms, summed over tensors: of the quantisation error, of the delta."""

    error: float = 0.0
    delta: float = 0.0


def run_merge(
    plan: MergePlan, *, base: Path, adapter: Path, out: Path, quantized: frozenset[str]
) -> MergeResult:
    """Execute `plan` and write `model.safetensors` (or shards and their index) into `out`.

    Args:
        plan: as made from these very folders.
        base: folder of the base checkpoint.
        adapter: PEFT folder.
        out: existing directory without weights.
        quantized: keys that training held in 4 bits; their error is measured whether or not
            the plan folds into the dequantised base.

    Raises:
        ArtifactError: unreadable input, or the output cannot be written (full disk).
    """
    result, norms = MergeResult(), _Norms()
    specs = [Spec(op.name, op.shape, op.dtype) for op in plan.ops]
    with (
        open_checkpoint(base) as weights,
        open_checkpoint(adapter, ADAPTER) as lora,
        CheckpointWriter(out, specs, max_shard_bytes=SHARD_BYTES) as writer,
    ):
        for op in plan.ops:
            measured = norms if op.name in quantized else None
            raw = (
                weights.raw(op.name)
                if op.kind == "copy"
                else _bytes(_compute(op, plan, weights, lora, result, measured))
            )
            bad = bits.nonfinite(raw, op.dtype)
            if bad:
                result.nonfinite[op.name] = bad
            writer.append(op.name, raw)
    result.sha256 = dict(writer.written.sha256)
    if norms.delta > 0:
        result.overall_error = (norms.error / norms.delta) ** 0.5
    return result


def _compute(
    op: MergeOp,
    plan: MergePlan,
    weights: Checkpoint,
    lora: Checkpoint,
    result: MergeResult,
    norms: _Norms | None,
) -> torch.Tensor:
    """One output tensor, in the base tensor's dtype; enters what it measured into `result`."""
    from tasks.weights.fold import delta, fold
    from tasks.weights.nf4 import as_trained

    stored = weights.torch(op.name)
    seen = stored
    if plan.quantization is not None and (op.dequantize or norms is not None):
        loaded = stored.to(_loaded_dtype(plan))
        seen = as_trained(loaded, plan.quantization).to(stored.dtype)
    start = seen if op.dequantize else stored
    if not op.a:
        return start
    change = delta(lora.torch(op.a), lora.torch(op.b), op.scale)
    merged = fold(start, change)
    result.changed[op.name] = float((merged != start).float().mean())
    if norms is not None:
        error, size = (stored.float() - seen.float()).norm() ** 2, change.norm() ** 2
        norms.error, norms.delta = norms.error + float(error), norms.delta + float(size)
        result.quantization_error[op.name] = float((error / size.clamp_min(1e-30)) ** 0.5)
    return merged


def _loaded_dtype(plan: MergePlan) -> Any:
    return torch_dtype(DTYPE_NAMES[plan.loaded_dtype])


def _bytes(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
