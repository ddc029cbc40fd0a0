"""The vLLM engine of every training rank: weight sync and generation.

An engine that fails ends the run, which goes on from its last checkpoint when it is started again:
vLLM 0.32 starts one engine with sleep mode per process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch

from tasks.core.errors import ConfigError, PlumblineError, TrainingError
from tasks.rl.experience.responses import Request
from tasks.rl.rollout.engines import (
    SyncResult,
    new_tokens,
    require_prompts_fit,
    response_seeds,
    rollout_time_limit,
)
from tasks.rl.rollout.merged import merged_tensors
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.rollout.vllm_support import require_servable
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import Colocation, Generated, Sampling
from tasks.serving.vllm.rollouts import Colocated
from tasks.training.job import TrainJob
from tasks.weights.model import Model, model_facts

LOG = logging.getLogger("plumbline.rl")

_MORE_MEMORY = (
    "more memory: rollout.kv_cache_gib=<GiB> on a CPU, rollout.gpu_memory=<share> on a GPU"
)
_FROM_CHECKPOINT = "start the run again: it goes on from its last checkpoint"
# vLLM 0.32 gives all engines of a machine that share CPU ranks the same names there.
_SHARED_MEMORY = (
    "a killed run left its shared memory, or another run with rollout.tensor_parallel is active; "
    "if there is none: rm -- /dev/shm/*-cpushm_*"
)


class VllmEngine:
    """Rollout engine with vLLM in this process, see `engines.Engine`.

    Args:
        policy: the policy, synced to vLLM.
        rollout: section `rollout`.
        ends: ids of end tokens.

    Raises:
        ConfigError: vLLM cannot sample from this policy.
        TrainingError: vLLM does not start.
    """

    def __init__(self, policy: Policy, rollout: Rollout, *, ends: tuple[int, ...]) -> None:
        self._policy = policy
        self._rollout = rollout
        self._colocation, self._sampling = engine_settings(policy, rollout, ends)
        self._engine: Colocated | None = self._start()
        self.reserved: dict[str, int] = {}  # bytes on a GPU, for `Ranks.peak_memory`

    @property
    def version(self) -> int:
        """Version of the policy that the engine samples from."""
        return 0 if self._engine is None else self._engine.version

    def sync_weights(self) -> SyncResult:
        """Sync the policy's weights, see `engines.Engine`."""
        began = time.perf_counter()
        version = self._policy.advance()
        tensors = self._sync(version)
        spent = time.perf_counter() - began
        return SyncResult(version, tensors, self._policy.nbytes, spent)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, see `engines.Engine`."""
        self._policy.require_current(self.version)
        require_prompts_fit(requests, self._rollout, self._policy.ranks.rank)
        group_requests, before = self._group_requests(requests)
        try:
            responses = self._generate(group_requests, greedy)
        except PlumblineError:
            raise
        except Exception as error:  # whatever vLLM and its kernels raise
            raise self._broken("broke down", error, _FROM_CHECKPOINT) from error
        return _by_request(responses[before:], requests)

    def sleep(self) -> None:
        """Free the accelerator's memory for training."""
        self._running.sleep()
        self.reserved = {"awake": self._running.awake, "asleep": self._running.slept}

    def wake(self) -> None:
        """Take the memory again. Weight syncs and generation also do so themselves."""
        self._running.wake()

    def close(self) -> None:
        """Shut vLLM down; the ranks' process group stays."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def _running(self) -> Colocated:
        if self._engine is None:
            raise TrainingError("the rollout engine has been closed")
        return self._engine

    def _start(self) -> Colocated:
        try:
            return Colocated(self._colocation, self._sampling)
        except PlumblineError:
            raise
        except Exception as error:  # whatever vLLM and its kernels raise
            hint = _SHARED_MEMORY if "SHMManager" in str(error) else _MORE_MEMORY
            raise self._broken("does not start", error, hint) from error

    def _broken(self, what: str, error: Exception, hint: str) -> TrainingError:
        LOG.debug("the rollout engine", exc_info=error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"  # pydantic's is the second
        rank = self._policy.ranks.rank
        return TrainingError(f"rank {rank}: the rollout engine {what}: {reason}", hint=hint)

    def _sync(self, version: int) -> int:
        """Send vLLM the policy's current weights; return the number of tensors.

        The KV cache is allocated again with the first request, since gathered weights need its
        memory until then.
        """
        self._running.wake_weights()
        if self._policy.as_adapter:
            with self._policy.adapter_folder() as folder:
                error = _error_of(lambda: self._running.load_adapter(folder, version))
            self._require_all(error)
            return len(self._policy.parameters)
        count = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal count
            for key, tensor in merged_tensors(self._policy.engine.module, self._facts):
                count += 1
                yield key, tensor

        self._require_all(_error_of(lambda: self._running.load_weights(counted(), version)))
        return count

    def _require_all(self, own_error: PlumblineError | None) -> None:
        """Raise the first rank's error on every rank, so that none waits for another."""
        for error in self._policy.ranks.all_objects(own_error):
            if error is not None:
                raise error

    @cached_property
    def _facts(self) -> Model:
        return model_facts(self._policy.job.base, self._policy.job.settings.dtype)

    def _group_requests(self, requests: Sequence[Request]) -> tuple[list[Request], int]:
        """Return the requests of all ranks that share this rank's engine, since each submits all.

        Returns:
            The requests, and the number of responses before this rank's own.
        """
        size, rank = self._colocation.tensor_parallel, self._policy.ranks.rank
        if size == 1:
            return list(requests), 0
        first = rank // size * size
        everyone = self._policy.ranks.all_objects(list(requests))
        before = sum(request.samples for of_rank in everyone[first:rank] for request in of_rank)
        group = [request for of_rank in everyone[first : first + size] for request in of_rank]
        return group, before

    def _generate(self, requests: Sequence[Request], greedy: bool) -> list[Generated]:
        prompts = [request.ids.tolist() for request in requests for _ in range(request.samples)]
        seeds = [seed for request in requests for seed in response_seeds(request)]
        limits = [new_tokens(r, self._rollout) for r in requests for _ in range(r.samples)]
        self._running.wake()
        return self._running.generate(prompts, seeds, limits=limits, greedy=greedy)


def _error_of(work: Callable[[], None]) -> PlumblineError | None:
    """Return the PlumblineError that `work` raises, or None."""
    try:
        work()
    except PlumblineError as error:
        return error
    return None


def _by_request(
    responses: Sequence[Generated], requests: Sequence[Request]
) -> list[list[Generated]]:
    """Split the responses by the requests that they belong to; the rest is other ranks'."""
    remaining = iter(responses)
    return [list(islice(remaining, request.samples)) for request in requests]


def engine_settings(
    policy: Policy, rollout: Rollout, ends: tuple[int, ...]
) -> tuple[Colocation, Sampling]:
    """Return the settings of a vLLM engine for a policy, inside a rank or in a server.

    Args:
        policy: the policy.
        rollout: section `rollout`.
        ends: ids of end tokens.

    Raises:
        ConfigError: vLLM cannot sample from this policy.
    """
    settings = policy.job.settings
    require_servable(settings, rollout)
    how = Colocation(
        model=_folder(policy.job),
        dtype=settings.dtype,
        max_model_len=rollout.max_prompt_len + rollout.max_new_tokens,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel=rollout.tensor_parallel,
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory=rollout.gpu_memory,
        adapter_rank=policy.largest_rank if policy.as_adapter else None,
        trust_remote_code=settings.trust_remote_code,
        timeout_s=rollout_time_limit(rollout, policy),
    )
    limits = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens)
    return how, Sampling(*limits, ends)


def _folder(job: TrainJob) -> Path:
    """Return the folder that vLLM loads: the base, or a QLoRA policy's dequantised base."""
    if job.rollout_base is not None:
        return job.rollout_base
    if job.settings.peft.kind == "qlora":
        raise ConfigError(
            "rollouts by vLLM need a QLoRA policy's dequantised base, and the job has none",
            hint="flows/rlhf.py makes it in its stage rollout_base",
        )
    return job.base
