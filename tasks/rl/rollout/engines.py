"""The interface of a rollout engine, and what all engines do with requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from tasks.core.errors import ConfigError, first_and_more
from tasks.rl.experience.responses import Request
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import Generated
from tasks.serving.vllm.job import time_limit


@dataclass(frozen=True)
class SyncResult:
    """Result of one weight sync.

    Attributes:
        version: of the policy; 1, 2, ...
        tensors: number of tensors sent; 0 if the engine samples from the trainer's own weights.
        nbytes: their size.
        seconds: duration on this rank.
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float


class Engine(Protocol):
    """Samples responses. All ranks call every method together and in the same order."""

    @property
    def version(self) -> int:
        """Version of the policy that the engine samples from; 0: none."""
        ...

    def sync_weights(self) -> SyncResult:
        """Sync the policy's current weights to the engine.

        Raises:
            TrainingError: the policy has values that are not finite.
            ContractError: the policy's tensors are not those of its configuration.
            ArtifactError: the engine rejects the weights.
        """
        ...

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, `samples` for each, in order.

        Args:
            requests: prompts of this rank; may be empty.
            greedy: take the most likely token instead of sampling.

        Raises:
            TrainingError: the policy has changed since the last sync; or the engine failed twice or
                timed out.
            ConfigError: a prompt is longer than the engine's context.
        """
        ...

    def sleep(self) -> None:
        """Free the accelerator's memory until the next sync. The weights may be lost."""
        ...

    def wake(self) -> None:
        """Take the memory again."""
        ...

    def close(self) -> None:
        """Shut the engine down and free everything."""
        ...


@runtime_checkable
class SamplesAhead(Engine, Protocol):
    """An engine that samples in the background, beside an update."""

    @property
    def mismatch(self) -> float:
        """Trainer-engine log-prob difference of the version that was synced last, in nats."""
        ...

    def start_ahead(self, requests: Sequence[Request]) -> None:
        """Begin to sample responses; `generate` with the same requests collects them.

        Args:
            requests: prompts of this rank; may be empty.

        Raises:
            TrainingError: the policy has changed since the last sync.
            ConfigError: a prompt is longer than the engine's context.
        """
        ...

    def finish_ahead(self) -> None:
        """Wait until all of them are there: a sync replaces what the engine samples from."""
        ...


def rollout_time_limit(rollout: Rollout, policy: Policy) -> float:
    """Return the seconds for one iteration's rollouts: the setting, or by the weights' size."""
    return rollout.timeout_s or time_limit([policy.job.base])


def response_seeds(request: Request) -> list[int]:
    """Return one seed per response to a request, independent of all others."""
    states = np.random.SeedSequence(request.seed).generate_state(request.samples, np.uint64)
    return [int(state >> np.uint64(1)) for state in states]


def new_tokens(request: Request, rollout: Rollout) -> int:
    """Return the token limit of a request's responses."""
    return rollout.max_new_tokens if request.limit is None else request.limit


def require_prompts_fit(requests: Sequence[Request], rollout: Rollout, rank: int) -> None:
    """Refuse prompts that are empty or longer than `rollout.max_prompt_len`.

    A request with a lower limit of new tokens may have a prompt that is longer by the difference:
    later turns of an episode do.

    Args:
        requests: prompts of this rank.
        rollout: section `rollout`.
        rank: this rank, for the error.

    Raises:
        ConfigError: names each of them.
    """
    limit, context = rollout.max_prompt_len, rollout.max_prompt_len + rollout.max_new_tokens
    long = [
        f"prompt {number} of rank {rank} ({' '.join(map(str, request.ids[:8]))} ...) has "
        f"{len(request.ids)} tokens"
        for number, request in enumerate(requests)
        if not 0 < len(request.ids) <= context - new_tokens(request, rollout)
    ]
    if long:
        raise ConfigError(
            f"{first_and_more(long)}; rollout.max_prompt_len={limit}",
            details=long[:20],
            hint=f"rollout.max_prompt_len={max(len(request.ids) for request in requests)}",
        )
