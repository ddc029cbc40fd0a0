"""How vLLM's engine draws tokens on a CPU: one uniform number a reply, and the inverse of the sums.

vLLM 0.32 gives every token of the vocabulary a Gumbel variable and takes the largest: 36 replies
and 32,000 tokens are a million logarithms, 6 ms. One number is enough: the token at which the
probabilities before it have summed up to it. Sums are taken by blocks first, then within one.

It also counts how many tokens are likelier than the one that is drawn, which nobody asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BLOCK = 256
"""Tokens summed up in fp32; what is summed over blocks, and in the one that is drawn, is fp64."""


def use_inverse_draws() -> None:
    """Exchange how vLLM draws in this process; the ranks that it tells of tokens are 0."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward_cpu(
        self: Any,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kept = apply_top_k_top_p(logits, k, p)
        logprobs = kept.log_softmax(dim=-1, dtype=torch.float32)
        told = {"processed_logits": kept, "processed_logprobs": logprobs}
        probs = kept.softmax(dim=-1, dtype=torch.float32)  # twice as fast as exp of those
        drawn = draw(probs, uniforms(len(logits), generators))
        return drawn, told.get(self.logprobs_mode)

    def no_ranks(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), dtype=torch.int64)

    topk_topp_sampler.TopKTopPSampler.forward_cpu = forward_cpu
    sampler.batched_count_greater_than = no_ranks


def uniforms(count: int, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """(count,) float64 in [0, 1), each from its reply's own generator where it has one."""
    drawn = torch.empty(count, dtype=torch.float64)
    for row in range(count):
        drawn[row].uniform_(generator=generators.get(row))
    return drawn


def draw(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """One token a row.

    Args:
        probs_NV: (N, V) float32, >= 0; rows sum up to about 1, and need not exactly.
        uniform_N: (N,) float64 in [0, 1).

    Returns:
        (N,) int64; never a token whose probability is 0.
    """
    size = probs_NV.shape[1]
    whole = size - size % BLOCK
    sums = probs_NV[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    sums = torch.cat((sums, probs_NV[:, whole:].sum(-1, keepdim=True)), 1).double()
    block, left = _reached(sums, uniform_N * sums.sum(1))
    at = block[:, None] * BLOCK + torch.arange(BLOCK)
    within = probs_NV.gather(1, at.clamp(max=size - 1)).double() * (at < size)
    token, _ = _reached(within, left)
    return block * BLOCK + token


def _reached(masses: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the sums of a row's masses, from its first, exceed its goal; and what is left there."""
    sums = masses.cumsum(1)
    # Sums of the same numbers in another order may differ in their last bit, and fall short of it.
    goal = goal.minimum(sums[:, -1].nextafter(torch.zeros((), dtype=sums.dtype)))
    at = torch.searchsorted(sums, goal[:, None], right=True)
    return at[:, 0], (goal - (sums - masses).gather(1, at)[:, 0]).clamp(min=0)
