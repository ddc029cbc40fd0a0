"""Deal prompts to several servers: a free one takes the next, and each is answered once.

A server that does not answer is asked for its health with growing pauses. If it stays silent it is
lost: its unanswered prompts go back to the queue, and the others take them. A response counts when
it has arrived as a whole, and a prompt is never under way at two servers, so nothing counts twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
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


@dataclass
class Dealing:
    """Responses to a number of requests, from several servers."""

    bodies: Sequence[dict[str, Any]]  # the requests, of `remote.request_body`
    version: int  # of the policy that the servers sample from
    at_once: int  # requests under way at one server
    timeout_s: float  # seconds for all of them together
    answered: Counter[str] = field(default_factory=Counter)  # number of responses by server
    _answers: dict[int, Generated] = field(default_factory=dict, repr=False)
    _tries: Counter[int] = field(default_factory=Counter, repr=False)

    def run(self, servers: Sequence[RemoteServer]) -> list[Generated]:
        """Return the responses to all requests, in order, from the servers that are not lost.

        A server that is lost meanwhile says so. Raises UnavailableError if none is left,
        TrainingError if the time is over or a request fails on healthy servers, ArtifactError for a
        response without token ids or log-probabilities.
        """
        asyncio.run(self._run(servers))
        return [self._answers[number] for number in range(len(self.bodies))]

    async def _run(self, servers: Sequence[RemoteServer]) -> None:
        self._servers = servers
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for number in range(len(self.bodies)):
            self._queue.put_nowait(number)
        lines = [_Line(server, self.timeout_s) for server in servers if not server.lost]
        self._end_if_none_left()
        if not self.bodies:
            self._end()
        for _ in range(min(self.at_once, len(self.bodies))):
            for line in lines:  # in turns, so that few requests are spread over all servers
                line.workers.append(asyncio.create_task(self._work(line)))
        tasks = [worker for line in lines for worker in line.workers]
        tasks += [asyncio.create_task(self._watch(line)) for line in lines]
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._done
        except TimeoutError:
            missing = len(self.bodies) - len(self._answers)
            raise TrainingError(
                f"rollouts: {missing} of {len(self.bodies)} responses are missing after "
                f"{self.timeout_s:g} s",
                hint="rollout.timeout_s=<more>, or shorter: rollout.max_new_tokens=<less>",
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for line in lines:
                await line.client.aclose()

    async def _work(self, line: _Line) -> None:
        """Answer requests with one server until it is lost."""
        while True:
            number = await self._queue.get()
            if line.server.lost:
                self._queue.put_nowait(number)
                return
            line.under_way.add(number)
            try:
                answer = await self._answer(line, number)
            except UnavailableError as error:
                line.under_way.discard(number)
                self._queue.put_nowait(number)
                if await line.is_healthy(error.message):
                    self._count_try(number, error)
                self._end_if_none_left()
                continue
            except Exception as error:  # no other server would do better
                self._end(error)
                return
            line.under_way.discard(number)
            assert number not in self._answers, f"request {number} was answered twice"
            self._answers[number] = answer
            self.answered[line.server.url] += 1
            if len(self._answers) == len(self.bodies):
                self._end()

    async def _answer(self, line: _Line, number: int) -> Generated:
        body = self.bodies[number] | {"model": line.server.model}
        answer = generated(await line.complete(body), body["model"], self.version)
        if not answer.ended and len(answer.ids) < body["max_tokens"]:
            raise ArtifactError(
                f"{line.server.url} cuts responses after {len(answer.ids)} of "
                f"{body['max_tokens']} tokens",
                hint="start it without a limit of its own (max_new_tokens)",
            )
        return answer

    def _count_try(self, number: int, error: UnavailableError) -> None:
        self._tries[number] += 1
        if self._tries[number] >= TRIES:
            message = f"request {number} failed {TRIES} times on servers that are healthy: "
            hint = "the log of the server says why"
            self._end(TrainingError(f"{message}{error.message}", hint=hint))

    async def _watch(self, line: _Line) -> None:
        """Give back the requests of a server that hangs, as after a power failure: no error."""
        while not line.server.lost:
            await asyncio.sleep(WATCH_S)
            await line.is_healthy(f"{line.server.url} hangs")
        for worker in line.workers:
            worker.cancel()
        for number in line.under_way:
            self._queue.put_nowait(number)
        self._end_if_none_left()

    def _end_if_none_left(self) -> None:
        lost = [server.lost for server in self._servers]
        if all(lost):
            self._end(UnavailableError("; ".join(lost) or "there is no server", details=lost))

    def _end(self, error: Exception | None = None) -> None:
        """End the run: everything is answered, or an error prevents it."""
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


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
                if response.is_success:
                    return response.json()
            except (httpx.HTTPError, ValueError) as error:
                raise UnavailableError(
                    f"{self.server.url} does not answer ({type(error).__name__}: {error})"
                ) from None
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
