"""PiSSA: an adapter initialised with the largest singular vectors of the base weights.

Meng et al. 2024, arXiv:2404.02948, eq. 2 to 4: W = U S V^T, A0 = sqrt(S_r / s) V_r^T and
B0 = U_r sqrt(S_r / s), with s the adapter's scale; the trained model is W - s B0 A0 + s B A.

The paper subtracts s B0 A0 from the base. Here the base stays as it is, and the adapter subtracts
that part, with twice the rank:

    W + s [B, -B0] [A; A0]

This is the same model without the rounding of a residual base. The artifact is a plain LoRA for the
original base (as peft converts a PiSSA adapter), it is merged and served like any other, and the
reference model is still the base without the adapter. A0 and B0 do not change, since their
gradients are set to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.model.gather_params import gathered

ADAPTER = "default"


def start_in_principal_components(adapted: nn.Module, *, niter: int | None, ranks: Ranks) -> None:
    """Initialise every LoRA pair of an adapter that was built with twice the rank.

    Args:
        adapted: peft's model.
        niter: power iterations of a randomised SVD (Halko et al. 2011, arXiv:0909.4061, alg. 4.4);
            None for an exact SVD, which takes minutes for a matrix of 10,000 x 10,000.
        ranks: the process group; each rank decomposes one matrix at a time and broadcasts it.
    """
    layers = list(_layers(adapted))
    for first in range(0, len(layers), ranks.world_size):
        batch = layers[first : first + ranks.world_size]
        mine = None
        for owner, layer in enumerate(batch):
            weight = layer.get_base_layer().weight
            with gathered([weight]):
                if owner == ranks.rank:
                    mine = _plain(layer, weight)
        for owner, layer in enumerate(batch):
            pair = _pair(layer)
            if owner == ranks.rank:
                assert mine is not None
                _fill(layer, *principal(mine, pair[0].shape[0] // 2, niter))
            for parameter in pair:
                dist.broadcast(parameter.data, owner)
            _freeze_second_half(*pair)


def principal(
    weight_OI: torch.Tensor, rank: int, niter: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sqrt(S_r) V_r^T, (r, I), and U_r sqrt(S_r), (O, r), of an fp32 matrix (O, I).

    Args:
        weight_OI: the matrix.
        rank: r, the number of singular vectors.
        niter: see `start_in_principal_components`.
    """
    if niter is None:
        left, values, right = torch.linalg.svd(weight_OI, full_matrices=False)
        right = right.mT
    else:
        left, values, right = torch.svd_lowrank(weight_OI, q=rank, niter=niter)
    roots = values[:rank].sqrt()
    return roots[:, None] * right[:, :rank].mT, left[:, :rank] * roots


def _layers(adapted: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    for module in adapted.modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            yield module


def _pair(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _plain(layer: Any, weight: nn.Parameter) -> torch.Tensor:
    """Return the weight as (out, in) in fp32, dequantised if it has 4 bits."""
    from peft.utils.integrations import dequantize_bnb_weight

    quantized = getattr(weight, "quant_state", None)
    plain = weight.data if quantized is None else dequantize_bnb_weight(weight, quantized)
    plain = plain.detach().float()
    return plain.mT.contiguous() if getattr(layer, "fan_in_fan_out", False) else plain.clone()


def _fill(layer: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    root = layer.scaling[ADAPTER] ** 0.5
    to_a, to_b = _pair(layer)
    to_a.data.copy_(torch.cat([a, a]) / root)
    to_b.data.copy_(torch.cat([b, -b], dim=1) / root)


def _freeze_second_half(a: nn.Parameter, b: nn.Parameter) -> None:
    rank = a.shape[0] // 2
    a.register_hook(_keep(rank, dim=0))
    b.register_hook(_keep(rank, dim=1))


def _keep(rank: int, *, dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        kept = grad.clone()
        kept.narrow(dim, rank, rank).zero_()
        return kept

    return hook
