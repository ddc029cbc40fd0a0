"""Rollouts by vLLM servers over HTTP: started by this run (`rollout.servers`), or `rollout.urls`.

Rank 0 speaks to the servers; the other ranks send it their requests and get their responses back.
The policy reaches the servers as a folder: the checked adapter, or the checked full weights.
`proof.py` then proves that each server samples from it.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

from tasks.core.errors import PlumblineError, TrainingError
from tasks.core.machine import gpu_count
from tasks.rl.responses import Request
from tasks.rl.rollout.engine import Engine
from tasks.rl.rollout.policy import memory_folder
from tasks.rl.rollout.proof import Numbers
from tasks.rl.settings import Online
from tasks.serving.rollout_servers import Fleet, RemoteServer, request_body
from tasks.serving.vllm.colocation import Generated

Everyone = Sequence[Sequence[Request]]
"""Requests of all ranks."""


class ServerEngine(Engine):
    """Rollout engine of vLLM servers.

    Raises ConfigError if servers at `rollout.urls` cannot be used, TrainingError if one does not
    start.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        urls = self.rollout.urls if self.ranks.first else ()
        servers = [RemoteServer(url.rstrip("/")) for url in urls]
        self._fleet = Fleet(self.how, servers)
        self._name = f"plumbline-{uuid.uuid4().hex[:8]}"
        # Requests that are sampled in the background; the responses to come, on rank 0.
        self._ahead: tuple[Everyone, Future[list[Generated]] | None] | None = None
        self._pool = ThreadPoolExecutor(1)
        self._stack = ExitStack()
        try:
            folder = memory_folder(self.ranks, 2 * self.policy.nbytes, root=self.rollout.sync_dir)
            self._folder = self._stack.enter_context(folder)
            self.ranks.on_first(self._open)
        except BaseException:
            self.close()
            raise

    def sync_weights(self) -> int:
        self.finish_ahead()
        version, self.version = self.policy.advance(), 0
        folder, timeout_s = self._folder / f"{self._name}-v{version}", self.how.timeout_s
        if self.ranks.first:
            folder.mkdir(parents=True)
        self.policy.write(folder if self.ranks.first else None)
        load = RemoteServer.load_adapter if self.policy.as_adapter else RemoteServer.load_weights
        self.ranks.on_first(lambda: self._fleet.each(lambda each: load(each, folder, timeout_s)))
        self.proof.prove(version, self)
        self.version = version
        self.ranks.on_first(lambda: self._forget_all_but(folder.name))
        return version

    def generate(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Generated]:
        # The first call after `start_ahead` that is not greedy has its requests.
        if self._ahead is not None and not greedy:
            everyone, future = self._ahead
            responses = self.ranks.on_first(lambda: _collected(future))
            self._ahead = None
        else:
            self.finish_ahead()
            self.policy.require_current(self.version)
            everyone = self.ranks.all_objects(list(requests))
            responses = self.ranks.on_first(lambda: self._sample(everyone, greedy))
        return self._own(responses, everyone, self.ranks.rank)

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Numbers]]:
        return self.ranks.on_first(lambda: self._fleet.each(lambda each: each.score(sequences)))

    def sample_each(
        self, prompts: Sequence[Sequence[int]], limit: int, seed: int
    ) -> dict[str, list[Generated]]:
        bodies = [
            request_body(prompt, self.how, seed + n, limit=limit)
            for n, prompt in enumerate(prompts)
        ]
        return self.ranks.on_first(
            lambda: self._fleet.each(lambda each: self._fleet.generate(bodies, seed, [each]))
        )

    def start_ahead(self, requests: Sequence[Request]) -> None:
        """Begin to sample responses in the background.

        Raises TrainingError if the policy has changed since the last sync.
        """
        self.policy.require_current(self.version)
        everyone = self.ranks.all_objects(list(requests))
        first = self.ranks.first
        future = self._pool.submit(self._sample, everyone, False) if first else None
        self._ahead = everyone, future

    def finish_ahead(self) -> None:
        """Wait until the servers have nothing to do: a sync replaces what they sample from."""
        if self._ahead is not None:
            wait([future for future in self._ahead[1:] if future is not None])
            self.ranks.barrier()

    def sleep(self) -> None:
        """Nothing to free: the servers have memory of their own."""

    def close(self) -> None:
        """End the servers of this run, and leave the others without the policy."""
        self._fleet.close()
        self._stack.close()

    def _open(self) -> None:
        settings, count = self.policy.job.settings, self.rollout.servers
        launch, overlaps = settings.launch, Online.of(settings.online).loop.staleness > 0
        if count:
            self._fleet.start(
                count,
                self.policy.job.checkpoints,
                ranks=launch.nproc,
                gpus=gpu_count() if self.ranks.gpu else 0,
                busy=launch.nproc * (launch.threads or 1) if overlaps else 0,
                threads=self.rollout.threads,
            )
        self._fleet.require_able()

    def _forget_all_but(self, current: str) -> None:
        """Remove earlier versions, which servers may read until they have the current one."""
        for folder in [path for path in self._folder.iterdir() if path.name != current]:
            if self.policy.as_adapter:
                self._fleet.each(partial(RemoteServer.unload_adapter, name=folder.name))
            shutil.rmtree(folder, ignore_errors=True)

    def _sample(self, everyone: Everyone, greedy: bool) -> list[Generated]:
        bodies = [
            request_body(
                request.ids.tolist(),
                self.how,
                request.sampling_seed,
                limit=self._limit(request),
                greedy=greedy,
            )
            for of_rank in everyone
            for request in of_rank
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
