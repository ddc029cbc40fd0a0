"""Interface of all rollout engines: their settings, and the requests of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tasks.rl.responses import Request
from tasks.rl.rollout.policy import Policy
from tasks.rl.rollout.proof import Numbers, SyncProof
from tasks.rl.settings import Online, Rollout, served_rank
from tasks.serving.vllm.colocation import Colocation, Generated
from tasks.serving.vllm.job import time_limit


class Engine(ABC):
    """Samples responses. All ranks call every method together and in the same order.

    The preflight has checked that vLLM can sample from the policy. `ends` are the ids that end a
    response, `probes` the prompts, at least one, for the proof of a sync.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        *,
        ends: tuple[int, ...],
        probes: Sequence[Sequence[int]],
    ) -> None:
        settings = policy.job.settings
        self.policy, self.ranks, self.rollout = policy, policy.ranks, rollout
        self.version = 0  # of the policy that the engine samples from; 0: none
        self.how = Colocation(
            policy.job.rollout_base or policy.job.base,  # dequantised for a QLoRA policy
            rollout,
            ends,
            dtype=settings.dtype,
            adapter_rank=served_rank(settings) if policy.as_adapter else None,
            trust_remote_code=settings.trust_remote_code,
            timeout_s=rollout.timeout_s or time_limit([policy.job.base]),
        )
        self.proof = SyncProof.of(
            probes,
            limit=Online.of(settings.online).loop.mismatch_limit,
            temperature=rollout.temperature,
            context=self.how.max_model_len,
        )

    @abstractmethod
    def sync_weights(self) -> int:
        """Sync the policy's current weights to the engine, prove it, and return their version.

        Raises TrainingError for values that are not finite, or an engine that computes with other
        weights; ContractError for tensors that are not those of the configuration; ArtifactError if
        the engine rejects them.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Generated]:
        """Sample the response to each of this rank's requests, or its greedy response.

        A rank may have none. Raises TrainingError if the policy has changed since the last sync, or
        the engine failed or timed out.
        """

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Numbers]]:
        """Return the log-probability of every token but the first, at temperature 1.

        By the name of each engine, the same on all ranks.
        """

    @abstractmethod
    def sample_each(
        self, prompts: Sequence[Sequence[int]], limit: int, seed: int
    ) -> dict[str, list[Generated]]:
        """Return each engine's response to each prompt, of up to `limit` tokens."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the accelerator's memory until the next sync. The weights may be lost."""

    @abstractmethod
    def close(self) -> None:
        """Shut the engine down and free everything."""

    @staticmethod
    def _own(
        responses: Sequence[Generated], by_rank: Sequence[Sequence[Request]], place: int
    ) -> list[Generated]:
        """Return the responses to the requests of one rank, from those of all ranks end to end."""
        start = sum(map(len, by_rank[:place]))
        return list(responses[start : start + len(by_rank[place])])

    def _limit(self, request: Request) -> int:
        """Return the token limit of a response."""
        return self.rollout.max_new_tokens if request.limit is None else request.limit
