"""Interface of all rollout engines, and the vLLM engine of every training rank.

An engine that fails ends the run, which goes on from its last checkpoint when it is started again:
vLLM 0.32 starts one engine with sleep mode per process.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tasks.core.errors import PlumblineError, TrainingError
from tasks.rl.responses import Request
from tasks.rl.rollout.policy import Policy, leads_node, memory_folder
from tasks.rl.rollout.proof import Numbers, SyncProof
from tasks.rl.settings import Online, Rollout, served_rank
from tasks.serving.vllm.colocation import Colocation, Generated, why_not_started
from tasks.serving.vllm.job import time_limit
from tasks.serving.vllm.rollouts import WEIGHTS, Colocated


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


LOG = logging.getLogger("plumbline.rl")
T = TypeVar("T")


class VllmEngine(Engine):
    """Rollout engine with vLLM in this process.

    An adapter is compared with vLLM's own tensors after each sync (`serving/vllm/loaded_adapter`),
    full weights by what the engine samples (`proof`). Raises TrainingError if vLLM does not start.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        with self._explained("does not start"):
            self._engine = Colocated(self.how)
        self.reserved: dict[str, int] = {}  # bytes on a GPU, for `Ranks.peak_memory`

    def sync_weights(self) -> int:
        version, self.version = self.policy.advance(), 0
        self._engine.wake(WEIGHTS)
        if self.policy.as_adapter:
            with memory_folder(self.ranks, self.policy.nbytes) as folder:
                self.policy.write(folder if leads_node() else None)
                self.ranks.barrier()
                self._on_all(lambda: self._engine.load_adapter(folder, version))
        else:
            self._on_all(lambda: self._engine.load_weights(self.policy.tensors(), version))
            self._engine.wake()  # its KV cache only now, since gathered weights needed the memory
            self.proof.prove(version, self)
        self.version = version
        return version

    def generate(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Generated]:
        self.policy.require_current(self.version)
        size, rank = self.rollout.tensor_parallel, self.ranks.rank
        by_rank = [list(requests)]
        if size > 1:  # ranks that share an engine submit the requests of all of them
            first = rank // size * size
            by_rank = self.ranks.all_objects(by_rank[0])[first : first + size]
        together = [request for of_rank in by_rank for request in of_rank]
        with self._explained("broke down", "the same command goes on from the last checkpoint"):
            self._engine.wake()
            responses = self._engine.generate(
                [request.ids.tolist() for request in together],
                [request.sampling_seed for request in together],
                limits=list(map(self._limit, together)),
                greedy=greedy,
            )
        return self._own(responses, by_rank, rank % size)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Numbers]]:
        return self._by_rank(self._engine.score(sequences))

    def sample_each(
        self, prompts: Sequence[Sequence[int]], limit: int, seed: int
    ) -> dict[str, list[Generated]]:
        seeds, limits = range(seed, seed + len(prompts)), [limit] * len(prompts)
        return self._by_rank(self._engine.generate(prompts, seeds, limits=limits))

    def sleep(self) -> None:
        """Free the accelerator's memory for training."""
        if self._engine.sleep():
            self.version = 0
        self.reserved = {"awake": self._engine.awake, "asleep": self._engine.slept}

    def close(self) -> None:
        """Shut vLLM down; the ranks' process group stays."""
        self._engine.close()

    @contextmanager
    def _explained(self, what: str, hint: str = "") -> Iterator[None]:
        """Turn whatever vLLM and its kernels raise into a TrainingError."""
        try:
            yield
        except PlumblineError:
            raise
        except Exception as error:
            LOG.debug("the rollout engine", exc_info=error)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            words = " ".join(lines[:2])[:400]  # pydantic's reason is in the second
            reason, more = why_not_started([f"{type(error).__name__}: {words}"])
            text = f"rank {self.ranks.rank}: the rollout engine {what}: {reason}"
            raise TrainingError(text, hint=hint or more) from error

    def _on_all(self, work: Callable[[], None]) -> None:
        """Do work on every rank; raise the first rank's error on all, so that none waits."""
        mine: PlumblineError | None = None
        try:
            work()
        except PlumblineError as error:
            mine = error
        for raised in self.ranks.all_objects(mine):
            if raised is not None:
                raise raised

    def _by_rank(self, mine: list[T]) -> dict[str, list[T]]:
        everyone = self.ranks.all_objects(mine)
        return {f"vLLM of rank {rank}": of_rank for rank, of_rank in enumerate(everyone)}
