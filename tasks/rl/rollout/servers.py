"""Rollouts by vLLM servers over HTTP: started by this run (`rollout.servers`), or `rollout.urls`.

Rank 0 speaks to the servers; the other ranks send it their requests and get their responses back.
The policy reaches the servers as a folder: the checked adapter, or the checked full weights.
`proof.py` then proves that each server samples from it.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.core.errors import PlumblineError, TrainingError
from tasks.core.machine import gpu_count
from tasks.rl.responses import Request
from tasks.rl.rollout.engine import by_request, singles
from tasks.rl.rollout.in_rank import engine_settings
from tasks.rl.rollout.merged import write_merged
from tasks.rl.rollout.policy import Policy, memory_folder
from tasks.rl.rollout.proof import Numbers, SyncProof
from tasks.rl.settings import Online, Rollout
from tasks.serving.rollout_servers.fleet import Fleet
from tasks.serving.rollout_servers.remote import RemoteServer, request_body
from tasks.serving.rollout_servers.started import places
from tasks.serving.vllm.colocation import Generated
from tasks.weights.model import Model, model_facts

Everyone = Sequence[Sequence[Request]]
"""Requests of all ranks."""


class ServerEngine:
    """Rollout engine of vLLM servers, see `engine.Engine`; `probes` are prompts for the proof.

    Raises ConfigError if servers at `rollout.urls` cannot be used, TrainingError if one does not
    start.
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
        self._policy, self._ranks, self._rollout = policy, policy.ranks, rollout
        self._proof = SyncProof.of(probes, policy, rollout, how.max_model_len)
        urls = rollout.urls if policy.ranks.first else ()
        servers = [RemoteServer(url.rstrip("/")) for url in urls]
        self._fleet = Fleet(how, self._sampling, servers)
        self._name = f"plumbline-{uuid.uuid4().hex[:8]}"
        self._version = 0
        self._ahead: tuple[Any, Future[list[Generated]] | None] | None = None  # on rank 0 a future
        self._pool = ThreadPoolExecutor(1)
        self._stack = ExitStack()
        try:
            self._folder = self._stack.enter_context(
                memory_folder(policy.ranks, 2 * self._nbytes, root=rollout.sync_dir)
            )
            self._ranks.on_first(self._open)
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

    def sync_weights(self) -> int:
        """Sync the policy's weights and prove it, see `engine.Engine`."""
        self.finish_ahead()
        version = self._policy.advance()
        self._version = 0
        folder = self._folder / self._named(version)
        self._write(folder if self._ranks.first else None)
        self._ranks.on_first(lambda: self._fleet.publish(folder.name, folder))
        self._proof.prove(version, self._policy, self)
        self._version = version
        self._ranks.on_first(lambda: self._forget_all_but(folder))
        return version

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, see `engine.Engine`.

        Requests that `start_ahead` began are only collected.
        """
        everyone = self._ranks.all_objects(list(requests))
        if self._ahead is not None and not greedy and self._ahead[0] == _key(everyone):
            responses = self._ranks.on_first(self._collect_ahead)
            self._ahead = None
            return self._mine(everyone, responses)
        self.finish_ahead()
        self._policy.require_current(self._version)
        responses = self._ranks.on_first(lambda: self._sample(everyone, greedy))
        return self._mine(everyone, responses)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Numbers]]:
        """Return the log-probabilities of sequences by every server, see `proof.Engines`."""
        return self._ranks.on_first(lambda: self._fleet.score(sequences))

    def sample_each(
        self, prompts: Sequence[Sequence[int]], limit: int, seed: int
    ) -> dict[str, list[Generated]]:
        """Return every server's response to each prompt, see `proof.Engines`."""
        short = replace(self._sampling, max_new_tokens=limit)
        return self._ranks.on_first(lambda: self._fleet.sample_each(prompts, short, seed, seed))

    def start_ahead(self, requests: Sequence[Request]) -> None:
        """Begin to sample responses in the background; the next `generate` collects them.

        It gets the same requests. Raises TrainingError if the policy has changed since the last
        sync.
        """
        self._policy.require_current(self._version)
        everyone = self._ranks.all_objects(list(requests))
        first = self._ranks.first
        future = self._pool.submit(self._sample, everyone, False) if first else None
        self._ahead = _key(everyone), future

    def finish_ahead(self) -> None:
        """Wait until the servers have nothing to do: a sync replaces what they sample from."""
        if self._ahead is not None:
            wait([future for future in self._ahead[1:] if future is not None])
            self._ranks.barrier()

    def _collect_ahead(self) -> list[Generated]:
        """Return what was sampled ahead, or raise what prevented it; on rank 0."""
        assert self._ahead is not None
        assert self._ahead[1] is not None
        try:
            return self._ahead[1].result()
        except PlumblineError:
            raise
        except Exception as error:
            raise TrainingError(f"sampling in the background failed: {error!r}") from error

    def sleep(self) -> None:
        """Nothing to free: the servers have memory of their own."""

    def close(self) -> None:
        """End the servers of this run, and leave the others without the policy."""
        self._fleet.close()
        self._stack.close()

    def _open(self) -> None:
        count, settings = self._rollout.servers, self._policy.job.settings
        if count:
            launch = settings.launch
            overlaps = Online.of(settings.online).loop.staleness > 0
            here = places(
                count,
                self._fleet.how,
                gpus=gpu_count() if self._ranks.gpu else 0,
                ranks=launch.nproc,
                busy_threads=launch.nproc * (launch.threads or 1) if overlaps else 0,
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

    def _write(self, folder: Path | None) -> None:
        """Write the policy to a folder; all ranks take part, those without one write nothing."""
        if folder is not None:
            folder.mkdir(parents=True)
        if self._policy.as_adapter:
            self._policy.write_adapter(folder)
        else:
            module, base = self._policy.engine.module, self._policy.job.base
            write_merged(module, self._facts, folder, base=base)

    def _sample(self, everyone: Everyone, greedy: bool) -> list[Generated]:
        requests = [request for of_rank in everyone for request in of_rank]
        bodies = [
            request_body(
                each.prompt,
                replace(self._sampling, max_new_tokens=each.limit),
                each.seed,
                greedy=greedy,
            )
            for each in singles(requests, self._rollout)
        ]
        return self._fleet.generate(bodies, self._version)

    def _mine(self, everyone: Everyone, responses: Sequence[Generated]) -> list[list[Generated]]:
        """Return this rank's responses by request, from those of all ranks."""
        rank = self._ranks.rank
        before = sum(request.samples for of_rank in everyone[:rank] for request in of_rank)
        return by_request(responses[before:], everyone[rank])


def _key(everyone: Everyone) -> list[Any]:
    """Return what tells the requests of all ranks apart from others."""
    return [
        [(r.ids.tobytes(), r.samples, r.seed, r.limit) for r in requests] for requests in everyone
    ]
