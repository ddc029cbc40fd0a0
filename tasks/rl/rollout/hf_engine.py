"""Rollouts by the training module itself: slower than vLLM, but never another policy.

Prompts are decoded in batches, padded on the left, with transformers' key-value cache. Under ZeRO-3
every forward pass gathers weights from all ranks, so all ranks run equally many: a rank that is
done continues its last batch until the others are done too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.rl.experience.responses import Request
from tasks.rl.rollout.decode_batch import DecodeBatch, DecodeRequest, cut
from tasks.rl.rollout.engines import (
    SyncResult,
    new_tokens,
    require_prompts_fit,
    response_seeds,
    rollout_time_limit,
)
from tasks.rl.rollout.merged import adapted_layers
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import Generated
from tasks.training.model import attention
from tasks.training.model.adapter import ADAPTER
from tasks.training.model.packed_model import model_of, restore_attention


class HfEngine:
    """Rollout engine that samples from the trainer's module, see `engines.Engine`.

    Args:
        policy: the policy, sampled in place.
        rollout: section `rollout`.
        ends: ids of end tokens.
    """

    def __init__(self, policy: Policy, rollout: Rollout, *, ends: tuple[int, ...]) -> None:
        self._policy = policy
        self._rollout = rollout
        self._ends = torch.tensor(ends, dtype=torch.long, device=policy.ranks.device)
        self._seconds, self._until = rollout_time_limit(rollout, policy), 0.0

    @property
    def version(self) -> int:
        """Version of the policy that the engine samples from."""
        return self._policy.version

    def sync_weights(self) -> SyncResult:
        """Check the policy and count its version; no weights are moved."""
        began = time.perf_counter()
        version = self._policy.advance()
        return SyncResult(version, 0, 0, time.perf_counter() - began)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, see `engines.Engine`."""
        self._policy.require_current(self.version)
        self._require_adapter()
        require_prompts_fit(requests, self._rollout, self._policy.ranks.rank)
        most = self._rollout.max_new_tokens
        to_decode = [
            DecodeRequest(
                request.ids,
                np.random.default_rng(seed).random(most),
                new_tokens(request, self._rollout),
            )
            for request in requests
            for seed in response_seeds(request)
        ]
        size = self._rollout.max_num_seqs
        batches = [to_decode[i : i + size] for i in range(0, len(to_decode), size)]
        self._until = time.monotonic() + self._seconds
        with self._inference():
            responses = [
                response
                for batch in self._equal_count(batches)
                for response in self._decode(batch, greedy)
            ]
        remaining = iter(responses)
        return [list(islice(remaining, request.samples)) for request in requests]

    def sleep(self) -> None:
        """No memory to free besides the trainer's."""

    def wake(self) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """Nothing to close."""

    def _require_adapter(self) -> None:
        """Check that every layer computes with the policy's adapter and no other.

        Raises:
            TrainingError: names the layers that do not.
        """
        wrong = [
            f"{name}: active {layer.active_adapters}, off {layer.disable_adapters}, merged "
            f"{layer.merged_adapters}"
            for name, layer in adapted_layers(model_of(self._policy.engine.module))
            if layer.disable_adapters or layer.merged or layer.active_adapters != [ADAPTER]
        ]
        if wrong:
            raise TrainingError(
                f"version {self.version} of the policy would not be sampled from: its adapter is "
                f"not what {len(wrong)} layers compute with, first {wrong[0]}",
                details=wrong[:20],
                hint="rl.kl_coef=0 runs without a reference, which switches the adapter off; "
                "please report this",
            )

    @property
    def _in_step(self) -> bool:
        """True under ZeRO-3, where all ranks have to run the same forward passes."""
        return self._policy.job.settings.zero.stage == 3

    def _equal_count(self, batches: list[list[DecodeRequest]]) -> list[list[DecodeRequest]]:
        """Under ZeRO-3, append empty batches until every rank has equally many."""
        if not self._in_step:
            return batches
        most = max(self._policy.ranks.all_objects(len(batches)))
        return batches + [[]] * (most - len(batches))

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        """Put the module in eval mode, with an attention that supports padding and a cache."""
        module, settings = self._policy.engine.module, self._policy.job.settings
        model, was = model_of(module), module.training
        packed = model.config._attn_implementation == attention.NAME
        restore_attention(model, settings.attn_implementation)
        module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            module.train(was)
            if packed:
                model.set_attn_implementation(attention.register())

    def _decode(self, batch: list[DecodeRequest], greedy: bool) -> list[Generated]:
        """Return the responses of one batch; an empty batch only joins the other ranks' passes."""
        limit = self._rollout.max_new_tokens
        state = DecodeBatch.of(batch or [DecodeRequest.nothing(limit)], self._policy.ranks.device)
        done = torch.full((len(state.ids),), not batch, device=state.ids.device)
        limits = [request.limit for request in batch]
        limit_B = torch.tensor(limits or [limit], device=state.ids.device)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        while len(tokens) < limit and self._unfinished(not bool(done.all())):
            logits = state.forward(self._policy.engine.module)
            token, logprob = self._sample(logits, state.uniform[:, len(tokens)], greedy)
            tokens.append(token)
            logprobs.append(logprob)
            done = done | torch.isin(token, self._ends) | (limit_B <= len(tokens))
            state.take(token)
            self._require_time()
        if not batch:
            return []
        return cut(torch.stack(tokens, 1), torch.stack(logprobs, 1), self._ends, limits)

    def _unfinished(self, mine: bool) -> bool:
        """Return True if a response is unfinished here or on a rank that needs this one."""
        if not self._in_step:
            return mine
        ranks = self._policy.ranks
        return bool(ranks.total(torch.tensor(int(mine), device=ranks.device)) > 0)

    def _sample(
        self, logits_BV: torch.Tensor, uniform_B: torch.Tensor, greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and their log-probabilities at the temperature, before top-p and top-k."""
        rollout = self._rollout
        logprobs_BV = (logits_BV.float() / rollout.temperature).log_softmax(-1)
        if greedy:
            token_B = logprobs_BV.argmax(-1)
        else:
            token_B = sample(logprobs_BV, uniform_B, top_p=rollout.top_p, top_k=rollout.top_k)
        return token_B, logprobs_BV.gather(1, token_B[:, None])[:, 0]

    def _require_time(self) -> None:
        # Under ZeRO-3 the other ranks wait in a collective call and end by its timeout.
        if time.monotonic() > self._until:
            raise TrainingError(
                f"rollouts are not done after {self._seconds:g} s",
                hint="rollout.timeout_s=<more>, or shorter: rollout.max_new_tokens=<less>",
            )


def sample(
    logprobs_BV: torch.Tensor, uniform_B: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """Sample one token per row by inverse transform sampling.

    Args:
        logprobs_BV: log-probabilities of all tokens.
        uniform_B: one random number in [0, 1) per row.
        top_p: sample among the most likely tokens with at least this total probability; 1: all.
        top_k: sample among this many most likely tokens; 0: all.

    Returns:
        (B,) token ids.
    """
    if top_p >= 1 and top_k == 0:
        return _inverse_transform(logprobs_BV.double().exp(), uniform_B)
    sorted_BV, order_BV = logprobs_BV.double().exp().sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_BV[:, top_k:] = 0
    before = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV[before >= top_p * sorted_BV.sum(-1, keepdim=True)] = 0
    return order_BV.gather(1, _inverse_transform(sorted_BV, uniform_B)[:, None])[:, 0]


def _inverse_transform(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds the random share of the total.

    Never an index of weight 0.
    """
    sums = weights_BV.cumsum(-1)
    threshold = uniform_B.to(sums.dtype)[:, None] * sums[:, -1:]
    last = weights_BV.shape[1] - 1 - (weights_BV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(torch.searchsorted(sums, threshold, right=True)[:, 0], last)
