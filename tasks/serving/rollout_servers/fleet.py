"""All rollout servers of a run: publish a policy to each, score with each, sample with all of them.

A server that does not answer is lost: the others take its prompts. With none left the run ends, and
the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, ConfigError, PlumblineError, TrainingError
from tasks.serving.rollout_servers.dealing import Dealing
from tasks.serving.rollout_servers.remote import (
    RefusedError,
    RemoteServer,
    UnavailableError,
    request_body,
)
from tasks.serving.rollout_servers.started import (
    Place,
    StartedServer,
    typed_command,
    wait_for_all,
)
from tasks.serving.vllm.colocation import Colocation, Generated, Sampling

T = TypeVar("T")
LOG = logging.getLogger("plumbline.rl")


@dataclass
class Fleet:
    """The rollout servers of a run."""

    how: Colocation  # settings of a server
    sampling: Sampling  # sampling parameters of responses
    urls: Sequence[str] = ()  # addresses of servers that somebody else has started
    started: list[StartedServer] = field(default_factory=list)  # servers that this run has started
    # name and folder of the policy that the servers have; None before the first
    published: tuple[str, Path] | None = None
    _elsewhere: list[RemoteServer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._elsewhere = [RemoteServer(url.rstrip("/")) for url in self.urls]

    def start(self, places: Sequence[Place], logs: Path) -> None:
        """Start a server at each place, and wait until all are ready. Raises TrainingError."""
        for number, place in enumerate(places):
            path = logs / f"rollout-server-{number}.log"
            self.started.append(StartedServer(self.how, self.sampling, place, log_path=path))
        wait_for_all(self.started, self.how.timeout_s)

    @property
    def servers(self) -> list[RemoteServer]:
        """Return all servers, lost ones too."""
        return [*self._elsewhere, *(server.remote for server in self.started)]

    @property
    def present(self) -> list[RemoteServer]:
        """Return the servers that are not lost."""
        return [server for server in self.servers if not server.lost]

    def require_able(self) -> None:
        """Raise ConfigError with every problem of every server, and the command of a good one."""
        answers = self._each(self._problems)
        problems = [problem for answer in answers for problem in answer or ()]
        if problems:
            raise ConfigError(
                f"rollout servers: {problems[0]}",
                details=problems,
                hint=f"a server for this run: {self}",
            )

    def publish(self, name: str, folder: Path) -> None:
        """Load a policy into every server that is not lost.

        The name of an adapter contains its version; full weights need none. The folder has to stay
        until the next policy is published. Raises ArtifactError if servers refuse it, TrainingError
        if no server is left.
        """
        self.published = (name, folder)
        self._each(self._publish_to)
        self._require_present()

    def forget(self, name: str) -> None:
        """Unload an adapter that is not used any more."""
        self._each(lambda server: server.unload_adapter(name))

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[NDArray[np.float64]]]:
        """Return the log-probabilities of sequences by each server, by its address."""
        asked = self.present
        scores = self._each(lambda server: server.score(sequences))
        return {server.url: some for server, some in zip(asked, scores, strict=True) if some}

    def sample_each(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, version: int
    ) -> dict[str, list[Generated]]:
        """Return one response to each prompt by each server, by its address."""

        def sample(server: RemoteServer) -> list[Generated]:
            dealing = Dealing(bodies, version, self.how.max_num_seqs, self.how.timeout_s)
            return dealing.run([server])

        bodies = [request_body(p, sampling, seed + number) for number, p in enumerate(prompts)]

        asked = self.present
        samples = self._each(sample)
        return {server.url: some for server, some in zip(asked, samples, strict=True) if some}

    def generate(self, bodies: Sequence[dict[str, Any]], version: int) -> list[Generated]:
        """Return the responses to requests, in order.

        Raises TrainingError if no server is left or the time is over, ArtifactError if a server
        does not return what is needed.
        """
        dealing = Dealing(bodies, version, self.how.max_num_seqs, self.how.timeout_s)
        before = self.present
        try:
            responses = dealing.run(before)
        except UnavailableError as error:
            LOG.warning("all rollout servers are lost: %s", error.message)
            self._require_present()
            raise
        for server in before:
            if server.lost:
                LOG.warning(
                    "rollout server lost (%s); the others took its prompts: %s",
                    server.lost,
                    ", ".join(f"{url} {count}" for url, count in dealing.answered.items()),
                )
        return responses

    def _problems(self, server: RemoteServer) -> list[str]:
        adapter, length = self.how.adapter_rank is not None, self.how.max_model_len
        return server.problems(adapter=adapter, max_model_len=length)

    def close(self) -> None:
        """Unload the policy from servers of others, and end those of this run."""
        for server in self._elsewhere:
            if self.published is not None and not server.lost:
                with suppress(PlumblineError):
                    server.unload_adapter(self.published[0])
            server.close()
        for started in self.started:
            started.end()

    def __str__(self) -> str:
        return typed_command(self.how, self.sampling)

    def _publish_to(self, server: RemoteServer) -> None:
        assert self.published is not None
        name, folder = self.published
        if self.how.adapter_rank is None:
            server.load_weights(folder, self.how.timeout_s)
        else:
            server.load_adapter(name, folder, self.how.timeout_s)

    def _each(self, work: Callable[[RemoteServer], T]) -> list[T | None]:
        """Return the results of all present servers, asked at the same time; None of a lost one.

        Raises ArtifactError if servers refuse; details name each.
        """
        refused: list[PlumblineError] = []

        def attempt(server: RemoteServer) -> T | None:
            try:
                return work(server)
            except UnavailableError as error:
                server.lost = error.message
            except (ArtifactError, RefusedError) as error:
                refused.append(error)
            return None

        present = self.present
        if not present:
            return []
        with ThreadPoolExecutor(len(present)) as pool:
            results = list(pool.map(attempt, present))
        if refused:
            raise ArtifactError(
                refused[0].message,
                details=[error.message for error in refused],
                hint=f"a server for this run: {self}",
            )
        return results

    def _require_present(self) -> None:
        if not self.present:
            lost = [server.lost for server in self.servers]
            raise TrainingError(
                f"no rollout server is left: {lost[0] if lost else 'none was named'}",
                details=lost,
                hint="the servers' logs say why; start them again and run the same command: it "
                "goes on from the last checkpoint",
            )
