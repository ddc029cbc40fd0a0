"""Who answers the prompts: the engine's interface, and which one a run gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tasks.core.errors import ConfigError, first_and_more
from tasks.rl.experience.responses import Generated, Request
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.settings import Rollout
from tasks.serving.vllm.job import time_limit
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob

ENGINES = ("vllm", "transformers")


@dataclass(frozen=True)
class Published:
    """A policy that an engine holds.

    Attributes:
        version: the first is 1, each one more than the one before.
        tensors: that were handed over; 0 where the engine samples from the trainer's own.
        nbytes: of them.
        seconds: that it took, this rank's clock.
    """

    version: int
    tensors: int
    nbytes: int
    seconds: float


class Engine(Protocol):
    """What samples replies. All ranks call every method together, and in the same order."""

    @property
    def version(self) -> int:
        """Of the policy that the next replies come from; 0: none was published yet."""
        ...

    def publish(self) -> Published:
        """Take the policy as it is now.

        Raises:
            TrainingError: it is not finite.
            ContractError: it does not hold what its configuration says.
            ArtifactError: the engine refuses it.
        """
        ...

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Answer this rank's own requests, `samples` replies to each, in their order.

        Args:
            requests: this rank's; none is a number of them, too.
            greedy: take the likeliest token instead of drawing one.

        Raises:
            TrainingError: the policy has changed since it was published; the engine broke down
                twice, or took too long.
            ConfigError: a prompt that is longer than the engine's context.
        """
        ...

    def sleep(self) -> None:
        """Leave the accelerator's memory to training, until it is published to.

        It may have forgotten the policy by then.
        """
        ...

    def wake(self) -> None:
        """Take it again."""
        ...

    def close(self) -> None:
        """End it and leave nothing behind."""
        ...


@contextlib.contextmanager
def open_engine(
    job: TrainJob, rollout: Rollout, ranks: Ranks, *, engine: Any, ends: Sequence[int]
) -> Iterator[Engine]:
    """The engine that section `rollout` asks for; it ends with the context. All ranks take part.

    Args:
        job: what is trained.
        rollout: who answers and how.
        ranks: this process among its peers.
        engine: DeepSpeed's, around the policy.
        ends: ids of tokens that end a reply.

    Raises:
        ConfigError: a policy that vLLM cannot sample from, every reason.
        TrainingError: the engine does not start.
    """
    policy = Policy(engine, job, ranks)
    found: Engine
    if rollout.engine == "transformers":
        from tasks.rl.rollout.hf_engine import NativeEngine

        found = NativeEngine(policy, rollout, ends=tuple(ends))
    elif rollout.engine == "vllm":
        from tasks.rl.rollout.vllm_engine import VllmEngine

        found = VllmEngine(policy, rollout, ends=tuple(ends))
    else:
        raise ConfigError(
            f"rollout.engine={rollout.engine} is not one of {', '.join(ENGINES)}",
            hint="rollout=vllm",
        )
    try:
        yield found
    finally:
        found.close()


def seconds_for(rollout: Rollout, policy: Policy) -> float:
    """Return the time limit of an iteration's rollouts: the setting, or by the policy's weights."""
    return rollout.timeout_s or time_limit([policy.job.base])


def reply_seeds(request: Request) -> list[int]:
    """A seed for each reply to a request, independent of each other and of other requests'."""
    drawn = np.random.SeedSequence(request.seed).generate_state(request.samples, np.uint64)
    return [int(one >> np.uint64(1)) for one in drawn]


def require_room(requests: Sequence[Request], rollout: Rollout, rank: int) -> None:
    """Refuse prompts that leave no room for a reply.

    Raises:
        ConfigError: naming each of them.
    """
    limit = rollout.max_prompt_len
    long = [
        f"prompt {number} of rank {rank} ({' '.join(map(str, one.ids[:8]))} ...) has "
        f"{len(one.ids)} tokens"
        for number, one in enumerate(requests)
        if not 0 < len(one.ids) <= limit
    ]
    if long:
        raise ConfigError(
            f"{first_and_more(long)}; rollout.max_prompt_len={limit}",
            details=long[:20],
            hint=f"rollout.max_prompt_len={max(len(one.ids) for one in requests)}",
        )
