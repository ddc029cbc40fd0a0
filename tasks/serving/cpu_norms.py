"""vLLM's own kernels of RMS norms, on a CPU too.

They are there, and vLLM 0.32 takes them on GPUs only: on a CPU it computes norms by eight calls of
torch, each through memory. Products of whole layers remain; norms were 5 % of a rollout.
"""

from __future__ import annotations

from typing import Any

import torch

PROVIDER = "cpu_kernels"
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}
"""What vLLM is told as `ir_op_priority`; where the kernels do not fit, it goes on as before."""


def use_norm_kernels() -> None:
    """Make the kernels known to vLLM in this process."""
    from vllm.ir.ops import fused_add_rms_norm, rms_norm

    if PROVIDER in rms_norm.impls:
        return

    def norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, epsilon)
        return out

    def add_and_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    rms_norm.register_impl(PROVIDER, supports_args=_fits_norm)(norm)
    register = fused_add_rms_norm.register_impl
    register(PROVIDER, supports_args=_fits_add, inplace=True)(add_and_norm)


def _fits_norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
    """The kernels read memory in one piece, and know one number format."""
    plain = weight is not None and variance_size is None and weight.dtype == x.dtype
    return plain and x.is_contiguous()


def _fits_add(
    x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits_norm(x, weight, epsilon, variance_size) and x_residual.is_contiguous()
