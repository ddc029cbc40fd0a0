"""All rollout servers of a run: publish a policy to each, score with each, sample with all of them.

Prompts stand in one queue: a server that is free takes the next, and each is answered once. A
server that does not answer after a few attempts is lost: its prompts go back to the queue. With no
server left the run ends, and the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, ConfigError, PlumblineError, TrainingError
from tasks.serving.rollout_servers.remote import (
    RefusedError,
    RemoteServer,
    UnavailableError,
    complete,
    request_body,
)
from tasks.serving.rollout_servers.started import Place, StartedServer, typed_command
from tasks.serving.vllm.colocation import Colocation, Generated, Sampling

T = TypeVar("T")
LOG = logging.getLogger("plumbline.rl")


@dataclass
class Fleet:
    """The rollout servers of a run."""

    how: Colocation  # settings of a server
    sampling: Sampling  # sampling parameters of responses
    servers: list[RemoteServer] = field(default_factory=list)  # lost ones, too
    started: list[StartedServer] = field(default_factory=list)  # those that this run has started
    # name and folder of the policy that the servers have; None before the first
    published: tuple[str, Path] | None = None

    def start(self, places: Sequence[Place], logs: Path) -> None:
        """Start a server at each place, and wait until all are ready. Raises TrainingError."""
        for number, place in enumerate(places):
            path = logs / f"rollout-server-{number}.log"
            self.started.append(StartedServer(self.how, self.sampling, place, log_path=path))
            self.servers.append(self.started[-1].remote)
        for server in self.started:
            server.wait()

    @property
    def present(self) -> list[RemoteServer]:
        """Return the servers that are not lost."""
        return [server for server in self.servers if not server.lost]

    @property
    def command(self) -> str:
        """Return the command that starts a server for this run on another machine."""
        return typed_command(self.how, self.sampling)

    def require_able(self) -> None:
        """Raise ConfigError with every problem of every server, and the command of a good one."""
        adapter, length = self.how.adapter_rank is not None, self.how.max_model_len
        problems = [p for server in self.servers for p in server.problems(adapter, length)]
        if problems:
            raise ConfigError(
                f"rollout servers: {problems[0]}",
                details=problems,
                hint=f"a server for this run: {self.command}",
            )

    def publish(self, name: str, folder: Path) -> None:
        """Load a policy into every server that is not lost.

        The name of an adapter contains its version; full weights need none. The folder has to stay
        until the next policy is published. Raises ArtifactError if servers refuse it.
        """
        self.published = (name, folder)
        timeout_s = self.how.timeout_s
        if self.how.adapter_rank is None:
            self._each(lambda server: server.load_weights(folder, timeout_s))
        else:
            self._each(lambda server: server.load_adapter(name, folder, timeout_s))

    def forget(self, name: str) -> None:
        """Unload an adapter that is not used any more."""
        self._each(lambda server: server.unload_adapter(name))

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[NDArray[np.float64]]]:
        """Return the log-probabilities of sequences by each server, by its address."""
        return self._each(lambda server: server.score(sequences))

    def sample_each(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, version: int
    ) -> dict[str, list[Generated]]:
        """Return one response to each prompt by each server, by its address."""
        bodies = [request_body(p, sampling, seed + number) for number, p in enumerate(prompts)]
        return self._each(lambda server: asyncio.run(self._deal(bodies, version, [server])))

    def generate(self, bodies: Sequence[dict[str, Any]], version: int) -> list[Generated]:
        """Return the responses to requests, in order.

        Raises TrainingError if no server is left or the time is over, ArtifactError if a server
        does not return what is needed.
        """
        before = self.present
        try:
            return asyncio.run(self._deal(bodies, version, before))
        finally:
            for server in before:
                if server.lost:
                    LOG.warning("rollout server lost (%s)", server.lost)

    def close(self) -> None:
        """Unload the policy from servers of others, and end those of this run."""
        own = [server.remote for server in self.started]
        for server in self.servers:
            if server not in own and self.published is not None and not server.lost:
                with suppress(PlumblineError):
                    server.unload_adapter(self.published[0])
            server.close()
        for started in self.started:
            started.end()

    async def _deal(
        self, bodies: Sequence[dict[str, Any]], version: int, servers: Sequence[RemoteServer]
    ) -> list[Generated]:
        """Return the responses to requests by these servers, in order."""
        queue, answers = deque(range(len(bodies))), dict[int, Generated]()

        async def work(server: RemoteServer, client: Any) -> None:
            while queue and not server.lost:
                number = queue.popleft()
                try:
                    answers[number] = await complete(server, client, bodies[number], version)
                except UnavailableError as error:
                    queue.appendleft(number)
                    server.lost = server.lost or error.message

        try:
            async with asyncio.timeout(self.how.timeout_s):
                while len(answers) < len(bodies):  # again if a lost server gave prompts back
                    present = [server for server in servers if not server.lost]
                    if not present:
                        raise self._none_left()
                    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                        clients = [
                            (server, await stack.enter_async_context(server.connections()))
                            for server in present
                        ]
                        for _ in range(min(self.how.max_num_seqs, len(queue))):
                            for each in clients:  # few requests are spread over all servers
                                group.create_task(work(*each))
        except TimeoutError:
            raise TrainingError(
                f"rollouts: {len(bodies) - len(answers)} of {len(bodies)} responses are missing "
                f"after {self.how.timeout_s:g} s",
                hint="rollout.timeout_s=<more>, or shorter: rollout.max_new_tokens=<less>",
            ) from None
        except ExceptionGroup as errors:  # no other server would do better
            raise errors.exceptions[0] from None
        return [answers[number] for number in range(len(bodies))]

    def _each(self, work: Callable[[RemoteServer], T]) -> dict[str, T]:
        """Return the results of all present servers, asked at the same time, by address.

        Raises ArtifactError if servers refuse; details name each. Raises TrainingError if no server
        is left.
        """
        refused: list[PlumblineError] = []

        def attempt(server: RemoteServer) -> list[T]:
            try:
                return [work(server)]
            except (ArtifactError, RefusedError) as error:
                refused.append(error)
            except (UnavailableError, TrainingError) as error:
                server.lost = server.lost or error.message
            return []

        present = self.present
        with ThreadPoolExecutor(max(1, len(present))) as pool:
            results = list(pool.map(attempt, present))
        if refused:
            raise ArtifactError(
                refused[0].message,
                details=[error.message for error in refused],
                hint=f"a server for this run: {self.command}",
            )
        if not self.present:
            raise self._none_left()
        return {s.url: result[0] for s, result in zip(present, results, strict=True) if result}

    def _none_left(self) -> TrainingError:
        lost = [server.lost for server in self.servers]
        return TrainingError(
            f"no rollout server is left: {lost[0] if lost else 'none was named'}",
            details=lost,
            hint="the servers' logs say why; start them again and run the same command: it "
            "goes on from the last checkpoint",
        )
