"""Rollouts by the training module itself: slower than vLLM, and always the very policy.

One batch at a time, padded on the left, with transformers' key-value cache. Under ZeRO-3 every
forward pass gathers weights from all ranks, so that all ranks make equally many: a rank that has
nothing left to answer goes on with its last batch until the others are done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.rl.experience.responses import Generated, Request
from tasks.rl.rollout.decode_batch import Asked, Growing, cut
from tasks.rl.rollout.engines import Published, reply_seeds, require_room, seconds_for
from tasks.rl.rollout.merged import adapted
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.rollout.sampling import sample
from tasks.rl.settings import Rollout
from tasks.training.model import attention
from tasks.training.model.fused_lora import ADAPTER
from tasks.training.model.packed_model import give_back_attention, model_of


class NativeEngine:
    """See `rollout.Engine`.

    Args:
        policy: what is trained; it is sampled from where it is.
        rollout: section `rollout`.
        ends: ids of tokens that end a reply.
    """

    def __init__(self, policy: Policy, rollout: Rollout, *, ends: tuple[int, ...]) -> None:
        self._policy = policy
        self._rollout = rollout
        self._ends = torch.tensor(ends, dtype=torch.long, device=policy.ranks.device)
        self._seconds, self._until = seconds_for(rollout, policy), 0.0

    @property
    def version(self) -> int:
        """Of the policy that the next replies come from."""
        return self._policy.version

    def publish(self) -> Published:
        """Check the policy and count it; nothing is moved."""
        began = time.perf_counter()
        version = self._policy.advance()
        return Published(version, 0, 0, time.perf_counter() - began)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Answer this rank's requests, see `rollout.Engine`."""
        self._policy.require_current(self.version)
        self._require_adapter()
        require_room(requests, self._rollout, self._policy.ranks.rank)
        most = self._rollout.max_new_tokens
        asked = [
            Asked(one.ids, np.random.default_rng(seed).random(most))
            for one in requests
            for seed in reply_seeds(one)
        ]
        size = self._rollout.max_num_seqs
        batches = [asked[i : i + size] for i in range(0, len(asked), size)]
        self._until = time.monotonic() + self._seconds
        with self._sampling():
            answers = [
                one for batch in self._padded(batches) for one in self._answer(batch, greedy)
            ]
        found = iter(answers)
        return [[next(found) for _ in range(one.samples)] for one in requests]

    def sleep(self) -> None:
        """Nothing is held beside the trainer."""

    def wake(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        """Nothing is left."""

    def _require_adapter(self) -> None:
        """Check that the module computes with the policy's adapter, and with no other one.

        Raises:
            TrainingError: naming the layers that do not.
        """
        wrong = [
            f"{name}: active {layer.active_adapters}, off {layer.disable_adapters}, merged "
            f"{layer.merged_adapters}"
            for name, layer in adapted(model_of(self._policy.engine.module))
            if layer.disable_adapters or layer.merged or layer.active_adapters != [ADAPTER]
        ]
        if wrong:
            raise TrainingError(
                f"version {self.version} of the policy would not be sampled from: its adapter is "
                f"not what {len(wrong)} layers compute with, first {wrong[0]}",
                details=wrong[:20],
                hint="rl.kl_coef=0 asks no reference, for which the adapter is switched off; and "
                "please report it",
            )

    @property
    def _together(self) -> bool:
        return self._policy.job.settings.zero.stage == 3

    def _padded(self, batches: list[list[Asked]]) -> list[list[Asked]]:
        """Under ZeRO-3 as many batches as the rank with the most of them; the rest is empty."""
        if not self._together:
            return batches
        most = max(self._policy.ranks.all_objects(len(batches)))
        return batches + [[]] * (most - len(batches))

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """The module in eval mode, with an attention that knows padding and a cache."""
        module, settings = self._policy.engine.module, self._policy.job.settings
        model, was = model_of(module), module.training
        packed = model.config._attn_implementation == attention.NAME
        give_back_attention(model, settings.attn_implementation)
        module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            module.train(was)
            if packed:
                model.set_attn_implementation(attention.register())

    def _answer(self, batch: list[Asked], greedy: bool) -> list[Generated]:
        """Replies to one batch; an empty one keeps the other ranks company."""
        limit = self._rollout.max_new_tokens
        state = Growing.of(batch or [Asked.nothing(limit)], self._policy.ranks.device)
        done = torch.full((len(state.ids),), not batch, device=state.ids.device)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        while len(tokens) < limit and self._anyone(not bool(done.all())):
            logits = state.forward(self._policy.engine.module)
            drawn = state.uniform[:, len(tokens)]
            token, logprob = self._draw(logits, drawn, greedy)
            tokens.append(token)
            logprobs.append(logprob)
            done = done | torch.isin(token, self._ends)
            state.take(token)
            self._require_time()
        if not batch:
            return []
        return cut(torch.stack(tokens, 1), torch.stack(logprobs, 1), self._ends)

    def _anyone(self, mine: bool) -> bool:
        """Whether a reply is still to be continued, here or where others wait for this rank."""
        if not self._together:
            return mine
        ranks = self._policy.ranks
        return bool(ranks.total(torch.tensor(int(mine), device=ranks.device)) > 0)

    def _draw(
        self, logits_BV: torch.Tensor, uniform_B: torch.Tensor, greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and their log-probabilities at the temperature, before any cut."""
        rollout = self._rollout
        logprobs_BV = (logits_BV.float() / rollout.temperature).log_softmax(-1)
        if greedy:
            token_B = logprobs_BV.argmax(-1)
        else:
            token_B = sample(logprobs_BV, uniform_B, top_p=rollout.top_p, top_k=rollout.top_k)
        return token_B, logprobs_BV.gather(1, token_B[:, None])[:, 0]

    def _require_time(self) -> None:
        # Under ZeRO-3 the others wait in a collective, whose own limit ends them.
        if time.monotonic() > self._until:
            raise TrainingError(
                f"rollouts are not done after {self._seconds:g} s",
                hint="rollout.timeout_s=<more>, or shorter: rollout.max_new_tokens=<less>",
            )
