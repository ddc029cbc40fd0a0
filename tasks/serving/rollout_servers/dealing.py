"""Deal prompts to several servers: a free one takes the next, and each is answered once.

A server that does not answer is asked for its health with growing pauses. If it stays silent it is
lost: its unanswered prompts go back to the queue, and the others take them. A response counts when
it has arrived as a whole, and a prompt is never under way at two servers, so nothing counts twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tasks.core.errors import ArtifactError, TrainingError
from tasks.serving.rollout_servers.remote import (
    RefusedError,
    RemoteServer,
    UnavailableError,
    generated,
    headers,
    reason,
)
from tasks.serving.vllm.colocation import Generated

PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Pauses before each question after a server's health; then it is lost."""
WATCH_S = 10.0
"""Seconds between questions after the health of a server that has work."""
TRIES = 4
"""Attempts at a prompt on servers that are healthy."""
_BUSY = (429, 503)
_HEALTH_S = 5.0

Body = Callable[[RemoteServer], dict[str, Any]]
"""Returns the request for one response, for the server that will answer it."""


@dataclass
class Dealing:
    """Responses to a number of requests, from several servers.

    Attributes:
        bodies: the requests.
        version: of the policy that the servers sample from.
        at_once: requests under way at one server.
        timeout_s: seconds for all of them together.
        answers: the responses so far, by number of the request.
        answered: number of responses by server.
    """

    bodies: Sequence[Body]
    version: int
    at_once: int
    timeout_s: float
    answers: dict[int, Generated] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def missing(self) -> list[int]:
        """Numbers of the requests without a response."""
        return [number for number in range(len(self.bodies)) if number not in self.answers]

    def run(self, servers: Sequence[RemoteServer]) -> list[Generated]:
        """Return the responses to all requests, in order. A later call asks for what is missing.

        Args:
            servers: those that are not lost are used; one that is lost meanwhile says so.

        Raises:
            UnavailableError: no server is left.
            TrainingError: the time is over, or a request fails on healthy servers.
            ArtifactError: a response without token ids or log-probabilities.
        """
        asyncio.run(self._run(servers))
        return [self.answers[number] for number in range(len(self.bodies))]

    async def _run(self, servers: Sequence[RemoteServer]) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        for number in self.missing:
            queue.put_nowait(number)
        complete = asyncio.Event()
        if queue.empty():
            complete.set()
        lines = [_Line(server, self.timeout_s) for server in servers if not server.lost]
        for _ in range(min(self.at_once, len(self.bodies))):
            for line in lines:  # in turns, so that few requests are spread over all servers
                line.workers.append(asyncio.create_task(self._work(line, queue, complete)))
        workers = {worker for line in lines for worker in line.workers}
        waiting = asyncio.create_task(complete.wait())
        watching = [asyncio.create_task(_watch(line, queue)) for line in lines]
        try:
            await self._wait(waiting, workers, servers)
        finally:
            for task in (waiting, *watching, *workers):
                task.cancel()
            await asyncio.gather(waiting, *watching, *workers, return_exceptions=True)
            for line in lines:
                await line.client.aclose()

    async def _wait(
        self,
        waiting: asyncio.Task[Any],
        workers: set[asyncio.Task[None]],
        servers: Sequence[RemoteServer],
    ) -> None:
        """Wait until everything is answered, a worker fails, no server is left or time is over."""
        until = time.monotonic() + self.timeout_s
        pending = set(workers)
        while not waiting.done():
            if not pending:
                lost = [server.lost for server in servers]
                raise UnavailableError("; ".join(lost) or "there is no server", details=lost)
            done, left = await asyncio.wait(
                {waiting, *pending},
                timeout=max(0.0, until - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                raise TrainingError(
                    f"rollouts: {len(self.missing)} of {len(self.bodies)} responses are missing "
                    f"after {self.timeout_s:g} s",
                    hint="rollout.timeout_s=<more>, or shorter: rollout.max_new_tokens=<less>",
                )
            for task in done - {waiting}:
                if not task.cancelled():  # by the watch of a server that hangs
                    task.result()
            pending = left - {waiting}

    async def _work(self, line: _Line, queue: asyncio.Queue[int], complete: asyncio.Event) -> None:
        """Answer requests with one server until it is lost."""
        while True:
            number = await queue.get()
            if line.server.lost:
                queue.put_nowait(number)
                return
            line.under_way.add(number)
            try:
                body = self.bodies[number](line.server)
                answer = generated(await line.complete(body), body["model"], self.version)
                if not answer.ended and len(answer.ids) < body["max_tokens"]:
                    raise ArtifactError(
                        f"{line.server.url} cuts responses after {len(answer.ids)} of "
                        f"{body['max_tokens']} tokens",
                        hint="start it without a limit of its own (max_new_tokens)",
                    )
            except UnavailableError as error:
                line.under_way.discard(number)
                queue.put_nowait(number)
                if await line.is_healthy(error.message):
                    self._count_try(number, error)
                continue
            line.under_way.discard(number)
            assert number not in self.answers, f"request {number} was answered twice"
            self.answers[number] = answer
            self.answered[line.server.url] = self.answered.get(line.server.url, 0) + 1
            if len(self.answers) == len(self.bodies):
                complete.set()

    def _count_try(self, number: int, error: UnavailableError) -> None:
        self._tries[number] = self._tries.get(number, 0) + 1
        if self._tries[number] >= TRIES:
            raise TrainingError(
                f"request {number} failed {TRIES} times on servers that are healthy: "
                f"{error.message}",
                hint="the log of the server says why",
            )


async def _watch(line: _Line, queue: asyncio.Queue[int]) -> None:
    """Give back the requests of a server that hangs, as after a power failure: no error comes."""
    while not line.server.lost:
        await asyncio.sleep(WATCH_S)
        if not await line.is_healthy(f"{line.server.url} hangs"):
            for worker in line.workers:
                worker.cancel()
            for number in line.under_way:
                queue.put_nowait(number)
            return


class _Line:
    """The connections to one server."""

    def __init__(self, server: RemoteServer, timeout_s: float) -> None:
        self.server = server
        self.workers: list[asyncio.Task[None]] = []
        self.under_way: set[int] = set()
        self.client = httpx.AsyncClient(
            base_url=server.url,
            headers=headers(server.key),
            timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._asking = asyncio.Lock()

    async def complete(self, body: dict[str, Any]) -> Any:
        """Return the answer to one request; wait while the server is busy."""
        for pause in (0.5, 1.0, 2.0, 4.0, 8.0, None):
            try:
                response = await self.client.post("/v1/completions", json=body)
                content = None if not response.is_success else response.json()
            except (httpx.HTTPError, ValueError) as error:
                raise UnavailableError(
                    f"{self.server.url} does not answer ({type(error).__name__}: {error})"
                ) from None
            if content is not None:
                return content
            if response.status_code not in _BUSY or pause is None:
                break
            await asyncio.sleep(pause)
        text = f"{self.server.url}: {reason(response)}"
        if response.status_code >= 500 or response.status_code in _BUSY:
            raise UnavailableError(text)
        raise RefusedError(text, hint="the log of the server says why")

    async def is_healthy(self, problem: str) -> bool:
        """Ask for the server's health, with pauses; mark it as lost and return False without."""
        async with self._asking:
            for pause in PAUSES_S:
                if self.server.lost or self.server.has_ended():
                    break
                await asyncio.sleep(pause)
                try:
                    response = await self.client.get("/health", timeout=_HEALTH_S)
                    if response.is_success:
                        return True
                except httpx.HTTPError:
                    continue
            self.server.lost = self.server.lost or problem
            return False
