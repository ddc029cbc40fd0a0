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
from functools import cached_property, partial
from pathlib import Path

from tasks.core.errors import PlumblineError, TrainingError
from tasks.core.machine import gpu_count
from tasks.rl.responses import Request
from tasks.rl.rollout.engine import own_responses, singles
from tasks.rl.rollout.in_rank import engine_settings
from tasks.rl.rollout.merged import write_merged
from tasks.rl.rollout.policy import Policy, memory_folder
from tasks.rl.rollout.proof import Numbers, SyncProof
from tasks.rl.settings import Online, Rollout
from tasks.serving.rollout_servers import Fleet, RemoteServer, places, request_body
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
        self.version = 0  # of the policy that the servers sample from
        # Requests that are sampled in the background; the responses to come, on rank 0.
        self._ahead: tuple[Everyone, Future[list[Generated]] | None] | None = None
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
    def mismatch(self) -> float:
        """Trainer-server log-prob difference at the last syncs, in nats per token."""
        return self._proof.mismatch

    def sync_weights(self) -> int:
        """Sync the policy's weights and prove it, see `engine.Engine`."""
        self.finish_ahead()
        version = self._policy.advance()
        self.version = 0
        folder = self._folder / f"{self._name}-v{version}"
        self._write(folder if self._ranks.first else None)
        self._ranks.on_first(lambda: self._fleet.each(lambda server: self._load(server, folder)))
        self._proof.prove(version, self._policy, self)
        self.version = version
        self._ranks.on_first(lambda: self._forget_all_but(folder))
        return version

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        """Sample responses to this rank's requests, see `engine.Engine`.

        The first call after `start_ahead` that is not greedy has its requests, and collects them.
        """
        if self._ahead is not None and not greedy:
            everyone, future = self._ahead
            responses = self._ranks.on_first(lambda: _collected(future))
            self._ahead = None
        else:
            self.finish_ahead()
            self._policy.require_current(self.version)
            everyone = self._ranks.all_objects(list(requests))
            responses = self._ranks.on_first(lambda: self._sample(everyone, greedy))
        return own_responses(responses, everyone, self._ranks.rank)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Numbers]]:
        """Return the log-probabilities of sequences by every server, see `proof.Engines`."""
        return self._ranks.on_first(
            lambda: self._fleet.each(lambda server: server.score(sequences))
        )

    def sample_each(
        self, prompts: Sequence[Sequence[int]], limit: int, seed: int
    ) -> dict[str, list[Generated]]:
        """Return every server's response to each prompt, see `proof.Engines`."""
        short = replace(self._sampling, max_new_tokens=limit)
        bodies = [request_body(prompt, short, seed + n) for n, prompt in enumerate(prompts)]
        return self._ranks.on_first(
            lambda: self._fleet.each(lambda server: self._fleet.generate(bodies, seed, [server]))
        )

    def start_ahead(self, requests: Sequence[Request]) -> None:
        """Begin to sample responses in the background.

        Raises TrainingError if the policy has changed since the last sync.
        """
        self._policy.require_current(self.version)
        everyone = self._ranks.all_objects(list(requests))
        first = self._ranks.first
        future = self._pool.submit(self._sample, everyone, False) if first else None
        self._ahead = everyone, future

    def finish_ahead(self) -> None:
        """Wait until the servers have nothing to do: a sync replaces what they sample from."""
        if self._ahead is not None:
            wait([future for future in self._ahead[1:] if future is not None])
            self._ranks.barrier()

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

    def _load(self, server: RemoteServer, folder: Path) -> None:
        """Load the policy into a server, which may read the folder until the next one is loaded."""
        if self._policy.as_adapter:
            server.load_adapter(folder.name, folder, self._fleet.how.timeout_s)
        else:
            server.load_weights(folder, self._fleet.how.timeout_s)

    def _forget_all_but(self, current: Path) -> None:
        """Remove earlier versions, which servers may read until they have the current one."""
        for folder in self._folder.iterdir():
            if folder != current:
                if self._policy.as_adapter:
                    self._fleet.each(partial(RemoteServer.unload_adapter, name=folder.name))
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
        requests = (request for of_rank in everyone for request in of_rank)
        bodies = [
            request_body(prompt, replace(self._sampling, max_new_tokens=limit), seed, greedy=greedy)
            for prompt, seed, limit in singles(requests, self._rollout)
        ]
        return self._fleet.generate(bodies, self.version)


def _collected(future: Future[list[Generated]] | None) -> list[Generated]:
    """Return what was sampled in the background, or raise what prevented it."""
    assert future is not None
    try:
        return future.result()
    except PlumblineError:
        raise
    except Exception as error:
        raise TrainingError(f"sampling in the background failed: {error!r}") from error
