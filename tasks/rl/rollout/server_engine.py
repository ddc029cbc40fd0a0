"""Rollouts by vLLM servers over HTTP: started by this run (`rollout.servers`), or `rollout.urls`.

Rank 0 speaks to the servers; the other ranks send it their requests and get their responses back.
The policy reaches the servers as a folder: the checked adapter, or the checked full weights.
`sync_proof.py` then proves that each server samples from it.
"""

from __future__ import annotations

import math
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.core.errors import TrainingError
from tasks.core.machine import gpu_count
from tasks.rl.experience.responses import Request
from tasks.rl.rollout.ahead import Ahead
from tasks.rl.rollout.engines import (
    SyncResult,
    new_tokens,
    require_prompts_fit,
    response_seeds,
)
from tasks.rl.rollout.memory_folder import memory_folder
from tasks.rl.rollout.merged import write_merged
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.rollout.sync_proof import SyncProof, probe_prompts, prove
from tasks.rl.rollout.vllm_engine import engine_settings
from tasks.rl.settings import Online, Rollout
from tasks.serving.rollout_servers.dealing import Body
from tasks.serving.rollout_servers.fleet import Fleet
from tasks.serving.rollout_servers.remote import RemoteServer
from tasks.serving.rollout_servers.started import places
from tasks.serving.vllm.colocation import Generated, Sampling
from tasks.weights.model import Model, model_facts


class ServerEngine:
    """Rollout engine of vLLM servers, see `engines.Engine`.

    Args:
        policy: the policy, synced to the servers.
        rollout: section `rollout`.
        ends: ids of end tokens.
        probes: prompts for the proof of a sync; at least one.

    Raises:
        ConfigError: vLLM cannot sample from this policy, or servers at `rollout.urls` cannot be
            used; details name every reason.
        TrainingError: a server does not start.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        *,
        ends: tuple[int, ...],
        probes: Sequence[Sequence[int]],
    ) -> None:
        how, self._sampling = engine_settings(policy, rollout, ends)
        self._policy, self._rollout = policy, rollout
        self._prompts = probe_prompts(probes, context=how.max_model_len)
        online = Online.of(policy.job.settings.online)
        self._proof = SyncProof(online.loop.mismatch_limit)
        self._overlaps = online.loop.staleness > 0
        self._fleet = Fleet(how, self._sampling, rollout.urls if policy.ranks.first else ())
        self._name = f"plumbline-{uuid.uuid4().hex[:8]}"
        self._version = 0
        self._ahead: Ahead | None = None
        self._stack = ExitStack()
        try:
            self._folder = self._stack.enter_context(
                memory_folder(policy.ranks, 2 * self._nbytes, root=rollout.sync_dir)
            )
            self._policy.ranks.on_first(self._open)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Version of the policy that the servers sample from."""
        return self._version

    @property
    def mismatch(self) -> float:
        """Trainer-server log-prob difference at the last syncs, in nats per token."""
        return self._proof.mismatch

    def sync_weights(self) -> SyncResult:
        """Sync the policy's weights and prove it, see `engines.Engine`."""
        began = time.perf_counter()
        self.finish_ahead()
        version = self._policy.advance()
        self._version = 0
        folder = self._folder / self._named(version)
        tensors = self._write(folder)
        self._policy.ranks.on_first(lambda: self._fleet.publish(folder.name, folder))
        prove(self._proof, version, self._policy, self._fleet, self._prompts)
        self._version = version
        self._policy.ranks.on_first(lambda: self._forget_all_but(folder))
        return SyncResult(version, tensors, self._policy.nbytes, time.perf_counter() - began)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, see `engines.Engine`.

        Requests that `start_ahead` began are only collected.
        """
        require_prompts_fit(requests, self._rollout, self._policy.ranks.rank)
        everyone = self._policy.ranks.all_objects(list(requests))
        ahead = self._ahead
        if ahead is not None and not greedy and ahead.is_for(everyone):
            self._ahead = None
            return self._mine(everyone, self._policy.ranks.on_first(ahead.result))
        self.finish_ahead()
        self._policy.require_current(self._version)
        return self._mine(
            everyone, self._policy.ranks.on_first(lambda: self._sample(everyone, greedy))
        )

    def start_ahead(self, requests: Sequence[Request]) -> None:
        """Begin to sample responses in the background; the next `generate` collects them.

        Args:
            requests: those of the next call of `generate`.

        Raises:
            TrainingError: the policy has changed since the last sync, or nobody has collected the
                responses of the last call.
            ConfigError: a prompt is longer than the engine's context.
        """
        if self._ahead is not None:
            raise TrainingError("responses that were sampled ahead have not been collected")
        self._policy.require_current(self._version)
        require_prompts_fit(requests, self._rollout, self._policy.ranks.rank)
        everyone = self._policy.ranks.all_objects(list(requests))
        work = partial(self._sample, everyone, False) if self._policy.ranks.first else None
        self._ahead = Ahead(everyone, work)

    def finish_ahead(self) -> None:
        """Wait until the servers have nothing to do: a sync replaces what they sample from."""
        if self._ahead is not None:
            self._ahead.wait()
            self._policy.ranks.barrier()

    def sleep(self) -> None:
        """Nothing to free: the servers have memory of their own."""

    def wake(self) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """End the servers of this run, and leave the others without the policy."""
        self._fleet.close()
        self._stack.close()

    def _open(self) -> None:
        count, ranks = self._rollout.servers, self._policy.ranks
        if count:
            launch = self._policy.job.settings.launch
            here = places(
                count,
                self._fleet.how,
                gpus=gpu_count() if ranks.gpu else 0,
                ranks=launch.nproc,
                busy_threads=launch.nproc * (launch.threads or 1) if self._overlaps else 0,
                threads=self._rollout.threads,
            )
            self._fleet.start(here, self._policy.job.checkpoints)
        self._fleet.require_able()

    def _named(self, version: int) -> str:
        return f"{self._name}-v{version}"

    def _forget_all_but(self, current: Path) -> None:
        """Remove earlier versions, which servers may read until they have the current one."""
        for folder in self._folder.iterdir():
            if folder != current:
                if self._policy.as_adapter:
                    self._fleet.forget(folder.name)
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _nbytes(self) -> int:
        """Bytes of one version of the policy as it is published."""
        if self._policy.as_adapter:
            return self._policy.nbytes
        item = 4 if self._policy.job.settings.dtype == "float32" else 2
        return sum(math.prod(expected.shape) * item for expected in self._facts.tensors)

    @cached_property
    def _facts(self) -> Model:
        return model_facts(self._policy.job.base, self._policy.job.settings.dtype)

    def _write(self, folder: Path) -> int:
        """Write the policy; return the number of tensors. All ranks take part, rank 0 writes."""
        writes = self._policy.ranks.first
        if writes:
            folder.mkdir(parents=True)
        if self._policy.as_adapter:
            self._policy.write_adapter(folder if writes else None)
            return len(self._policy.parameters)
        engine = self._policy.engine
        return write_merged(engine.module, self._facts, folder if writes else None,
                            base=self._policy.job.base)  # fmt: skip

    def _sample(self, everyone: Sequence[Sequence[Request]], greedy: bool) -> list[Generated]:
        bodies: list[Body] = [
            partial(
                _body,
                request=request,
                sampling=replace(self._sampling, max_new_tokens=new_tokens(request, self._rollout)),
                seed=seed,
                greedy=greedy,
            )
            for requests in everyone
            for request in requests
            for seed in response_seeds(request)
        ]
        return self._fleet.generate(bodies, self._version) if bodies else []

    def _mine(
        self, everyone: Sequence[Sequence[Request]], responses: Sequence[Generated]
    ) -> list[list[Generated]]:
        """Return this rank's responses by request, from those of all ranks."""
        remaining = iter(responses)
        by_rank = [
            [list(islice(remaining, request.samples)) for request in requests]
            for requests in everyone
        ]
        return by_rank[self._policy.ranks.rank]


def _body(
    server: RemoteServer, *, request: Request, sampling: Sampling, seed: int, greedy: bool
) -> dict[str, Any]:
    return server.body(request.ids.tolist(), sampling, seed, greedy=greedy)
