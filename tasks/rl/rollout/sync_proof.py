"""Proof that servers sample from the policy that was just synced to them.

A server's weights cannot be read back over HTTP, but its distribution can. At each sync every
server samples short responses to a few prompts. The trainer scores them at once, at the rollout
temperature: that is the train-inference mismatch of this server and this version. Server and
trainer score them again after the next sync. Both then know the log-probabilities of the same
tokens before and after. An old version is refused by either of two signs:

    frozen   the trainer's numbers changed, and the server's are bit by bit those of before
    behind   where the trainer moved clearly, by three times the noise, the server did not follow

The noise is the 95 % quantile of the differences of trainer and server at equal versions so far.
Single tokens decide nothing: rounding flips a few by more than a small step moves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.core.errors import TrainingError
from tasks.rl.rollout.policy_sync import Policy
from tasks.serving.rollout_servers.fleet import Fleet
from tasks.serving.rollout_servers.remote import RemoteServer
from tasks.serving.vllm.colocation import Generated
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.model.packed_model import TokenOutputs
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.packing import pack

PROBES = 16
"""Responses of each server per sync."""
PROMPT_TOKENS, NEW_TOKENS = 64, 16
"""Longest prompt and response of a probe."""
RECENT = 5
"""Syncs whose mean is the mismatch."""
_CHANGED = 16
"""Numbers of the trainer that must have changed before a frozen server is refused."""
_FROZEN = 0.1
"""Share of a server's numbers that may change though its weights did not: batches differ."""
_CLEAR, _CLEARLY = 8, 3.0
"""Number of tokens with a clear move that decide, and how many times the noise is clear."""
_FOLLOWED = 0.25
"""Share of them that a server with the new version follows at least."""
Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Probe:
    """A prompt and a response sampled from one version of the policy.

    Attributes:
        prompt: token ids.
        response: token ids, and log-probabilities by the server at the rollout temperature.
    """

    prompt: tuple[int, ...]
    response: Generated

    @property
    def sequence(self) -> list[int]:
        """Token ids of prompt and response."""
        return [*self.prompt, *self.response.ids.tolist()]

    def of_response(self, scores: Numbers) -> Numbers:
        """Return the part of a sequence's scores that belongs to the response."""
        return scores[len(self.prompt) - 1 :]


def trainer_scores(
    engine: Any, probes: Sequence[Probe], ranks: Ranks, temperature: float = 1.0
) -> Numbers:
    """Return the trainer's log-probabilities of all responses, end to end. All ranks take part.

    Args:
        engine: the DeepSpeed engine of the policy.
        probes: the same on all ranks.
        ranks: this process and its peers.
        temperature: of the log-probabilities.
    """
    if not probes:
        return np.zeros(0)
    marks = np.concatenate(
        [
            np.repeat(np.array([0, 1], np.uint8), [len(p.prompt), len(p.response.ids)])
            for p in probes
        ]
    )
    row = pack(Examples.of_texts([p.sequence for p in probes], marks), range(len(probes)))
    was_training = engine.module.training
    engine.eval()
    with torch.no_grad():
        scores = engine(row=row.to(ranks.device), outputs=TokenOutputs(temperature))
    engine.train(was_training)
    numbers: Numbers = scores.double().cpu().numpy()
    return numbers


def probe_prompts(prompts: Sequence[Sequence[int]], *, context: int) -> list[tuple[int, ...]]:
    """Return the prompts of the probes, cut so that a response and one more token follow.

    Args:
        prompts: token ids of at least one prompt.
        context: tokens that the servers take.
    """
    longest = max(1, min(PROMPT_TOKENS, context - _new_tokens(context) - 1))
    return [tuple(map(int, prompts[i % len(prompts)]))[:longest] for i in range(PROBES)]


def _new_tokens(context: int) -> int:
    return max(1, min(NEW_TOKENS, context - 2))


def prove(
    proof: SyncProof,
    version: int,
    policy: Policy,
    fleet: Fleet,
    prompts: Sequence[tuple[int, ...]],
) -> None:
    """Prove that all servers sample from a version. All ranks take part.

    Servers and trainer score at the same time.

    Args:
        proof: of the last sync; becomes that of this one.
        version: of the policy that was just published.
        policy: the policy.
        fleet: the servers, which only rank 0 asks.
        prompts: of the probes.

    Raises:
        TrainingError: a server samples from something else.
    """
    ranks, engine, old = policy.ranks, policy.engine, proof.probes
    temperature = fleet.sampling.temperature
    short = replace(fleet.sampling, max_new_tokens=_new_tokens(fleet.how.max_model_len))
    with _Beside(
        ranks, lambda: (_by_server(fleet, old), fleet.sample_each(prompts, short, version, version))
    ) as asked:
        now = trainer_scores(engine, old, ranks)
        scores, samples = asked.result()
    ranks.on_first(lambda: proof.require_moved(version, now, scores))
    probes = {
        url: [Probe(prompt, response) for prompt, response in zip(prompts, some, strict=True)]
        for url, some in samples.items()
    }
    unique = {tuple(probe.sequence): probe for some in probes.values() for probe in some}
    new = list(unique.values())
    with _Beside(ranks, lambda: _by_server(fleet, new)) as asked:
        plain = trainer_scores(engine, new, ranks)
        warm = plain if temperature == 1 else trainer_scores(engine, new, ranks, temperature)
        servers = asked.result()
    ends = np.cumsum([len(probe.response.ids) for probe in new])[:-1]
    of_probe = dict(zip(unique, np.split(warm, ends), strict=True))
    sampled = {
        url: np.concatenate([probe.response.logprobs for probe in some]).astype(np.float64)
        for url, some in probes.items()
    }
    trainer = {
        url: np.concatenate([of_probe[tuple(probe.sequence)] for probe in some])
        for url, some in probes.items()
    }
    apart = ranks.on_first(lambda: proof.require_sampled(version, sampled, trainer))
    proof.recent = [*proof.recent, apart][-RECENT:]
    proof.remember(new, plain, servers)


class _Beside:
    """Work of rank 0 beside what all ranks compute; a context that waits for its end.

    Args:
        ranks: this process and its peers.
        work: runs in a thread of rank 0.
    """

    def __init__(self, ranks: Ranks, work: Callable[[], Any]) -> None:
        self._ranks, self._pool = ranks, ThreadPoolExecutor(1)
        self._future = self._pool.submit(work) if ranks.first else None

    def __enter__(self) -> _Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def result(self) -> Any:
        """Return the result of rank 0 on every rank, or raise its error there."""
        future = self._future
        return self._ranks.on_first(lambda: None if future is None else future.result())


def _by_server(fleet: Fleet, probes: Sequence[Probe]) -> dict[str, Numbers]:
    """Return each server's log-probabilities of all responses, end to end."""
    if not probes:
        return {}
    return {
        url: np.concatenate([p.of_response(s) for p, s in zip(probes, some, strict=True)])
        for url, some in fleet.score([probe.sequence for probe in probes]).items()
    }


@dataclass
class SyncProof:
    """Probes of the last sync, and their log-probabilities by trainer and servers.

    Attributes:
        limit: `rl.mismatch_limit`, nats per token.
        probes: sampled after the last sync, by all servers.
        trainer: their log-probabilities by the trainer then.
        servers: the same by each server, by its address.
        recent: mean absolute differences at the last syncs, nats per token.
        noise: 95 % quantile of trainer-server differences, the largest of all syncs so far.
    """

    limit: float
    probes: list[Probe] = field(default_factory=list)
    trainer: Numbers = field(default_factory=lambda: np.zeros(0))
    servers: Mapping[str, Numbers] = field(default_factory=dict)
    recent: list[float] = field(default_factory=list)
    noise: float = 0.0

    @property
    def mismatch(self) -> float:
        """Mean of `recent`, nats per token: a single sync has few tokens."""
        return sum(self.recent) / max(len(self.recent), 1)

    def remember(
        self, probes: list[Probe], trainer: Numbers, servers: Mapping[str, Numbers]
    ) -> None:
        """Keep the probes of a proven sync, for the next one. Arguments are the attributes."""
        self.probes, self.trainer, self.servers = probes, trainer, servers
        for scores in servers.values():
            self.noise = max(self.noise, float(np.quantile(np.abs(scores - trainer), 0.95)))

    def require_moved(self, version: int, trainer: Numbers, servers: Mapping[str, Numbers]) -> None:
        """Check that each server moved from the last version to this one as the trainer did.

        Args:
            version: of the policy that was just synced.
            trainer: the trainer's scores of `probes` now.
            servers: those of each server.

        Raises:
            TrainingError: a server still has the last version, or is too far from the trainer.
        """
        for url, now in servers.items():
            self._require_near(url, version, np.abs(now - trainer).mean())
            before = self.servers.get(url)
            if before is None:
                continue
            self._require_new(url, version, trainer - self.trainer, now - before)

    def require_same(self, server: RemoteServer, version: int) -> None:
        """Check a server that joined after the last sync.

        Raises:
            TrainingError: it samples from something else.
        """
        scores = server.score([probe.sequence for probe in self.probes])
        parts = [p.of_response(s) for p, s in zip(self.probes, scores, strict=True)]
        distance = np.abs(np.concatenate(parts) - self.trainer).mean()
        self._require_near(server.url, version, float(distance))

    def require_sampled(
        self, version: int, sampled: Mapping[str, Numbers], trainer: Mapping[str, Numbers]
    ) -> float:
        """Check the log-probabilities that servers report for their own responses.

        Args:
            version: of the policy.
            sampled: by each server, at the rollout temperature.
            trainer: by the trainer, for the same tokens at the same temperature.

        Returns:
            The mean absolute difference, in nats per token.
        """
        apart = {url: float(np.abs(sampled[url] - trainer[url]).mean()) for url in sampled}
        for url, distance in apart.items():
            self._require_near(url, version, distance)
        return sum(apart.values()) / max(len(apart), 1)

    def _require_near(self, url: str, version: int, distance: float) -> None:
        if not distance <= self.limit:
            raise TrainingError(
                f"{url} does not sample from version {version} of the policy: its "
                f"log-probabilities are {distance:.3g} nats per token from the trainer's, more "
                f"than rl.mismatch_limit={self.limit:g}",
                hint="it serves another base model, or reports log-probabilities at another "
                "temperature (--logprobs-mode), or keeps old weights",
            )

    def _require_new(self, url: str, version: int, moved: Numbers, server: Numbers) -> None:
        changed, changed_there = np.count_nonzero(moved), np.count_nonzero(server)
        frozen = changed >= max(_CHANGED, moved.size / 2) and changed_there <= _FROZEN * moved.size
        clear = np.abs(moved) > _CLEARLY * self.noise
        followed = (server * np.sign(moved) > np.abs(moved) / 2)[clear]
        behind = clear.sum() >= _CLEAR and followed.mean() < _FOLLOWED
        if frozen or behind:
            raise TrainingError(
                f"{url} answers with an old version of the policy instead of version {version}: "
                f"{changed} of {moved.size} log-probabilities changed in the trainer and "
                f"{changed_there} in the server, which followed {followed.sum()} of "
                f"{clear.sum()} clear moves",
                details=[
                    f"the trainer moved by {np.abs(moved).mean():.3g} nats per token, the server "
                    f"by {np.abs(server).mean():.3g}; noise {self.noise:.3g}"
                ],
                hint="restart the server; is another run using it?",
            )
