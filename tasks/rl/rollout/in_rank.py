"""The vLLM engine of every training rank: weight sync and generation.

An engine that fails ends the run, which goes on from its last checkpoint when it is started again:
vLLM 0.32 starts one engine with sleep mode per process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

from tasks.core.errors import PlumblineError, TrainingError
from tasks.rl.responses import Request
from tasks.rl.rollout.engine import own_responses, served_rank, singles
from tasks.rl.rollout.merged import merged_tensors
from tasks.rl.rollout.policy import Policy
from tasks.rl.rollout.proof import Numbers, SyncProof
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import Colocation, Generated, Sampling
from tasks.serving.vllm.job import time_limit
from tasks.serving.vllm.rollouts import WEIGHTS, Colocated
from tasks.weights.model import Model, model_facts

LOG = logging.getLogger("plumbline.rl")
T = TypeVar("T")


class VllmEngine:
    """Rollout engine with vLLM in this process, see `engine.Engine`.

    An adapter is compared with vLLM's own tensors after each sync (`serving/vllm/loaded_adapter`),
    full weights by what the engine samples (`proof`), from at least one of `probes`. Raises
    TrainingError if vLLM does not start.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        *,
        ends: tuple[int, ...],
        probes: Sequence[Sequence[int]],
    ) -> None:
        self._policy, self._rollout = policy, rollout
        self._how, sampling = engine_settings(policy, rollout, ends)
        self._proof = SyncProof.of(probes, policy, rollout, self._how.max_model_len)
        more_memory = "rollout.kv_cache_gib=<GiB> on a CPU, rollout.gpu_memory=<share> on a GPU"
        with self._explained("does not start", f"more memory: {more_memory}"):
            self._engine = Colocated(self._how, sampling)
        self.reserved: dict[str, int] = {}  # bytes on a GPU, for `Ranks.peak_memory`

    @property
    def version(self) -> int:
        """Version of the policy that the engine samples from."""
        return self._engine.version

    def sync_weights(self) -> int:
        """Sync the policy's weights, see `engine.Engine`."""
        version = self._policy.advance()
        self._engine.wake(WEIGHTS)
        if self._policy.as_adapter:
            with self._policy.adapter_folder() as folder:
                self._on_all(lambda: self._engine.load_adapter(folder, version))
            return version
        tensors = merged_tensors(self._policy.engine.module, self._facts)
        self._on_all(lambda: self._engine.load_weights(tensors, version))
        self._engine.wake()  # its KV cache only now, since gathered weights needed the memory
        try:
            self._proof.prove(version, self._policy, self)
        except PlumblineError:
            self._engine.version = 0
            raise
        return version

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, see `engine.Engine`."""
        self._policy.require_current(self.version)
        size, rank = self._how.tensor_parallel, self._policy.ranks.rank
        by_rank = [list(requests)]
        if size > 1:  # ranks that share an engine submit the requests of all of them
            first = rank // size * size
            by_rank = self._policy.ranks.all_objects(by_rank[0])[first : first + size]
        each = singles((request for of_rank in by_rank for request in of_rank), self._rollout)
        with self._explained("broke down", "the same command goes on from the last checkpoint"):
            self._engine.wake()
            responses = self._engine.generate(
                [single.prompt for single in each],
                [single.seed for single in each],
                limits=[single.limit for single in each],
                greedy=greedy,
            )
        return own_responses(responses, by_rank, rank % size)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Numbers]]:
        """Return the log-probabilities of sequences by every rank's engine, see `proof.Engines`."""
        return self._by_rank(self._engine.score(sequences))

    def sample_each(
        self, prompts: Sequence[Sequence[int]], limit: int, seed: int
    ) -> dict[str, list[Generated]]:
        """Return every rank's response to each prompt, see `proof.Engines`."""
        seeds, limits = range(seed, seed + len(prompts)), [limit] * len(prompts)
        return self._by_rank(self._engine.generate(prompts, seeds, limits=limits))

    def sleep(self) -> None:
        """Free the accelerator's memory for training."""
        self._engine.sleep()
        self.reserved = {"awake": self._engine.awake, "asleep": self._engine.slept}

    def close(self) -> None:
        """Shut vLLM down; the ranks' process group stays."""
        self._engine.close()

    @contextmanager
    def _explained(self, what: str, hint: str) -> Iterator[None]:
        """Turn whatever vLLM and its kernels raise into a TrainingError."""
        try:
            yield
        except PlumblineError:
            raise
        except Exception as error:
            LOG.debug("the rollout engine", exc_info=error)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            words = " ".join(lines[:2])[:400]  # pydantic's reason is in the second
            reason = f"the rollout engine {what}: {type(error).__name__}: {words}"
            raise TrainingError(f"rank {self._policy.ranks.rank}: {reason}", hint=hint) from error

    def _on_all(self, work: Callable[[], None]) -> None:
        """Do work on every rank; raise the first rank's error on all, so that none waits."""
        mine: PlumblineError | None = None
        try:
            work()
        except PlumblineError as error:
            mine = error
        for raised in self._policy.ranks.all_objects(mine):
            if raised is not None:
                raise raised

    @cached_property
    def _facts(self) -> Model:
        return model_facts(self._policy.job.base, self._policy.job.settings.dtype)

    def _by_rank(self, mine: list[T]) -> dict[str, list[T]]:
        everyone = self._policy.ranks.all_objects(mine)
        return {f"vLLM of rank {rank}": of_rank for rank, of_rank in enumerate(everyone)}


def engine_settings(
    policy: Policy, rollout: Rollout, ends: tuple[int, ...]
) -> tuple[Colocation, Sampling]:
    """Return the settings of a vLLM engine for a policy, inside a rank or in a server.

    The preflight has checked that vLLM can sample from it.
    """
    settings = policy.job.settings
    how = Colocation(
        model=policy.job.rollout_base or policy.job.base,  # dequantised for a QLoRA policy
        dtype=settings.dtype,
        max_model_len=rollout.max_prompt_len + rollout.max_new_tokens,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel=rollout.tensor_parallel,
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory=rollout.gpu_memory,
        adapter_rank=served_rank(settings) if policy.as_adapter else None,
        trust_remote_code=settings.trust_remote_code,
        timeout_s=rollout.timeout_s or time_limit([policy.job.base]),
    )
    limits = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens)
    return how, Sampling(*limits, ends)
