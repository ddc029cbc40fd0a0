"""vLLM beside every training rank, as the loop sees it: published to, asked, and started again.

An engine that breaks down on one rank is started again on all of them, together: handing it the
policy has collective calls. That happens once in a run; after that it is an error. One that ranks
share (`rollout.tensor_parallel`) ends the run at once: while one of them has an error the others
wait for it within vLLM, where nothing but their end reaches them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from tasks.core.errors import ConfigError, PlumblineError, TrainingError
from tasks.rl.experience.responses import Generated, Request
from tasks.rl.rollout.engines import Published, reply_seeds, require_room, seconds_for
from tasks.rl.rollout.merged import merged_tensors
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.rollout.vllm_support import require_servable
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import Answer, Colocation, Sampling
from tasks.serving.vllm.rollouts import Colocated
from tasks.training.job import TrainJob
from tasks.weights.plan.contracts import ModelFacts, model_facts

T = TypeVar("T")
LOG = logging.getLogger("plumbline.rl")


class VllmEngine:
    """See `rollout.Engine`.

    Args:
        policy: what is published to it.
        rollout: section `rollout`.
        ends: ids of tokens that end a reply.

    Raises:
        ConfigError: a policy that vLLM cannot sample from.
        TrainingError: it does not start.
    """

    def __init__(self, policy: Policy, rollout: Rollout, *, ends: tuple[int, ...]) -> None:
        settings = policy.job.settings
        require_servable(settings, rollout)
        self._policy = policy
        self._rollout = rollout
        self._restarted = False
        self._sampling = Sampling(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, ends
        )
        self._how = Colocation(
            model=_folder(policy.job),
            dtype=settings.dtype,
            max_model_len=rollout.max_prompt_len + rollout.max_new_tokens,
            max_num_seqs=rollout.max_num_seqs,
            tensor_parallel=rollout.tensor_parallel,
            kv_cache_gib=rollout.kv_cache_gib,
            gpu_memory=rollout.gpu_memory,
            adapter_rank=policy.largest_rank if policy.as_adapter else None,
            trust_remote_code=settings.trust_remote_code,
            timeout_s=seconds_for(rollout, policy),
        )
        self._engine: Colocated | None = None
        self._start()

    @property
    def version(self) -> int:
        """Of the policy that the next replies come from."""
        return 0 if self._engine is None else self._engine.version

    def publish(self) -> Published:
        """Hand the policy over, see `rollout.Engine`."""
        began = time.perf_counter()
        version = self._policy.advance()
        tensors = self._hand_over(version)
        spent = time.perf_counter() - began
        return Published(version, tensors, self._policy.nbytes, spent)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Answer this rank's requests, see `rollout.Engine`."""
        self._policy.require_current(self.version)
        require_room(requests, self._rollout, self._policy.ranks.rank)
        asked, before = self._of_group(requests)
        while True:
            answers, failed = _tried(lambda: self._answers(asked, greedy))
            if failed and self._how.tensor_parallel > 1:
                raise self._broken_down(failed, "which other ranks share")
            failures = [one for one in self._policy.ranks.all_objects(failed) if one]
            if answers is not None and not failures:
                return _shared_out(answers[before:], requests)
            self._start_again(failures[0])

    def sleep(self) -> None:
        """Leave the accelerator's memory to training."""
        self._running.sleep()

    def wake(self) -> None:
        """Take it again; publishing (without the KV cache) and generating do so by themselves."""
        self._running.wake()

    def close(self) -> None:
        """End vLLM; the ranks' process group stays."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def _running(self) -> Colocated:
        if self._engine is None:
            raise TrainingError("the rollout engine has been closed")
        return self._engine

    def _start(self) -> None:
        """Start vLLM; if that fails, once more."""
        engine, failed = _tried(lambda: Colocated(self._how, self._sampling))
        if engine is None:
            LOG.warning("the rollout engine did not start (%s); once more", failed)
            engine, failed = _tried(lambda: Colocated(self._how, self._sampling))
        if engine is None:
            raise TrainingError(
                f"rank {self._policy.ranks.rank}: the rollout engine does not start: {failed}",
                hint="its memory: rollout.kv_cache_gib=<GiB> on a CPU, rollout.gpu_memory=<share> "
                "on a GPU; rollout=transformers needs none",
            )
        self._engine = engine

    def _start_again(self, why: str) -> None:
        if self._restarted:
            raise self._broken_down(why, "a second time")
        LOG.warning("the rollout engine broke down (%s); it is started again", why)
        self._restarted = True
        version = self.version
        self.close()
        self._start()
        self._hand_over(version)

    def _broken_down(self, why: str, how: str) -> TrainingError:
        return TrainingError(
            f"rank {self._policy.ranks.rank}: the rollout engine broke down, {how}: {why}",
            hint="rollout=transformers",
        )

    def _hand_over(self, version: int) -> int:
        """Give vLLM the policy as it is; how many tensors.

        The KV cache comes back with the first request: until then gathered weights need its room.
        """
        self._running.wake_weights()
        if self._policy.as_adapter:
            with self._policy.adapter_folder() as folder:
                failed = _refused(lambda: self._running.take_adapter(folder, version))
            self._require_all(failed)
            return len(self._policy.parameters)
        count = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal count
            for key, tensor in merged_tensors(self._policy.engine.module, self._facts):
                count += 1
                yield key, tensor

        self._require_all(_refused(lambda: self._running.take_weights(counted(), version)))
        return count

    def _require_all(self, failed: PlumblineError | None) -> None:
        """Raise the first rank's error on every rank, so that none waits for another."""
        for error in self._policy.ranks.all_objects(failed):
            if error is not None:
                raise error

    @cached_property
    def _facts(self) -> ModelFacts:
        return model_facts(self._policy.job.base, self._policy.job.settings.dtype)

    def _of_group(self, requests: Sequence[Request]) -> tuple[list[Request], int]:
        """Requests of all ranks that share this rank's engine, since each of them works on all.

        Returns:
            The requests, and how many replies come before this rank's own.
        """
        size, rank = self._how.tensor_parallel, self._policy.ranks.rank
        if size == 1:
            return list(requests), 0
        first = rank // size * size
        everyone = self._policy.ranks.all_objects(list(requests))
        before = sum(one.samples for some in everyone[first:rank] for one in some)
        return [one for some in everyone[first : first + size] for one in some], before

    def _answers(self, requests: Sequence[Request], greedy: bool) -> list[Answer]:
        prompts = [one.ids.tolist() for one in requests for _ in range(one.samples)]
        seeds = [seed for one in requests for seed in reply_seeds(one)]
        self._running.wake()
        return self._running.generate(prompts, seeds, greedy=greedy)


def _refused(work: Callable[[], None]) -> PlumblineError | None:
    """Return the error of ours that `work` raises, or None."""
    try:
        work()
    except PlumblineError as error:
        return error
    return None


def _tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """What `work` gives, or why it gives nothing; errors of our own are no breakdown and pass."""
    try:
        return work(), ""
    except PlumblineError:
        raise
    except Exception as error:  # whatever vLLM and its kernels raise
        LOG.debug("the rollout engine", exc_info=True)
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0][:300]}"


def _shared_out(answers: Sequence[Answer], requests: Sequence[Request]) -> list[list[Generated]]:
    """The first answers by the requests that they belong to."""
    each = iter(answers)
    return [
        [Generated(a.ids, a.logprobs, a.ended) for a in islice(each, one.samples)]
        for one in requests
    ]


def _folder(job: TrainJob) -> Path:
    """What vLLM loads. A policy in 4 bits is sampled from as it is trained, or not at all."""
    if job.rollout_base is not None:
        return job.rollout_base
    if job.settings.peft.quantization() is not None:
        raise ConfigError(
            "rollout.engine=vllm needs a QLoRA policy's dequantised base, and the job has none",
            hint="flows/rlhf.py makes it, by its stage rollout_base; or rollout=transformers",
        )
    return job.base
