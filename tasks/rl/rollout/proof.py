"""Proof that vLLM samples from the policy that was just synced to it.

A server's weights cannot be read back over HTTP, nor full weights as an engine packs them, but the
distribution can. At each sync every engine samples short responses to a few prompts. The trainer
scores them at once, at the rollout temperature: that is the train-inference mismatch of this engine
and this version. Engine and trainer score them again after the next sync. Both then know the
log-probabilities of the same tokens before and after. An old version is refused by either of two
signs:

    frozen   the trainer's numbers changed, and the engine's are bit by bit those of before
    behind   where the trainer moved clearly, by three times the noise, the engine did not follow

The noise is the 95 % quantile of the differences of trainer and engine at equal versions so far.
Single tokens decide nothing: rounding flips a few by more than a small step moves the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import TrainingError
from tasks.rl.rollout.policy import Policy
from tasks.training.model.packed_model import TokenOutputs, evaluating
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import pack

if TYPE_CHECKING:
    from tasks.rl.rollout.engine import Engine

PROBES = 16
"""Responses of each engine per sync."""
PROMPT_TOKENS, NEW_TOKENS = 64, 16
"""Longest prompt and response of a probe."""
RECENT = 5
"""Syncs whose mean is the mismatch."""
_CHANGED = 16
"""Numbers of the trainer that must have changed before a frozen engine is refused."""
_FROZEN = 0.1
"""Share of an engine's numbers that may change though its weights did not: batches differ."""
_CLEAR, _CLEARLY = 8, 3.0
"""Number of tokens with a clear move that decide, and how many times the noise is clear."""
_FOLLOWED = 0.25
"""Share of them that an engine with the new version follows at least."""
Numbers: TypeAlias = NDArray[np.float64]


Probe: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt, and of a response sampled from one version of the policy."""


@dataclass
class SyncProof:
    """Probes of the last sync, and their log-probabilities by trainer and engines."""

    limit: float  # `rl.mismatch_limit`, nats per token
    prompts: Sequence[tuple[int, ...]] = ()  # of the probes
    new_tokens: int = NEW_TOKENS  # token limit of their responses
    temperature: float = 1.0  # of the rollouts
    probes: Sequence[Probe] = ()  # sampled after the last sync, by all engines
    # their log-probabilities by the trainer then, at temperature 1
    trainer: Numbers = field(default_factory=lambda: np.zeros(0))
    engines: Mapping[str, Numbers] = field(default_factory=dict)  # the same by each engine
    # mean absolute differences at the last syncs, nats per token
    recent: list[float] = field(default_factory=list)
    # 95 % quantile of trainer-engine differences, the largest of all syncs so far
    noise: float = 0.0

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], *, limit: float, temperature: float, context: int
    ) -> SyncProof:
        """Return the proof of the first sync; a probe and one more token fit into the context."""
        new_tokens = max(1, min(NEW_TOKENS, context - 2))
        longest = max(1, min(PROMPT_TOKENS, context - new_tokens - 1))
        cut = [tuple(map(int, prompts[i % len(prompts)]))[:longest] for i in range(PROBES)]
        return cls(limit, cut, new_tokens, temperature)

    @property
    def mismatch(self) -> float:
        """Mean of `recent`, nats per token: a single sync has few tokens."""
        return sum(self.recent) / max(len(self.recent), 1)

    def prove(self, version: int, engine: Engine) -> None:
        """Prove that all engines sample from the version that was just synced. Every rank calls it.

        Raises TrainingError on every rank if one samples from something else.
        """
        ranks, policy = engine.ranks, engine.policy
        if self.probes:
            now, scores = _trainer_scores(policy, self.probes), _scores(self.probes, engine)
            ranks.on_first(lambda: self.require_moved(version, now, scores))
        sampled = engine.sample_each(self.prompts, self.new_tokens, version)
        pairs = {
            name: [(p, tuple(r.ids.tolist())) for p, r in zip(self.prompts, responses, strict=True)]
            for name, responses in sampled.items()
        }
        probes = list(dict.fromkeys(probe for of_engine in pairs.values() for probe in of_engine))
        plain = warm = _trainer_scores(policy, probes)
        if self.temperature != 1:
            warm = _trainer_scores(policy, probes, self.temperature)
        ends = np.cumsum([len(response) for _, response in probes])[:-1]
        by_trainer = dict(zip(probes, np.split(warm, ends), strict=True))
        compared = {
            name: (
                np.concatenate([response.logprobs for response in sampled[name]]),
                np.concatenate([by_trainer[probe] for probe in of_engine]),
            )
            for name, of_engine in pairs.items()
        }
        self.recent.append(ranks.on_first(lambda: self.require_sampled(version, compared)))
        del self.recent[:-RECENT]
        self.remember(probes, plain, _scores(probes, engine))

    def remember(
        self, probes: Sequence[Probe], trainer: Numbers, engines: Mapping[str, Numbers]
    ) -> None:
        """Keep the probes of a proven sync, for the next one. Arguments are the attributes."""
        self.probes, self.trainer, self.engines = probes, trainer, engines
        for scores in engines.values():
            self.noise = max(self.noise, float(np.quantile(np.abs(scores - trainer), 0.95)))

    def require_moved(self, version: int, trainer: Numbers, engines: Mapping[str, Numbers]) -> None:
        """Check that each engine moved from the last version to this one as the trainer did.

        `trainer` and `engines` are scores of `probes` now. Raises TrainingError if an engine still
        has the last version, or is too far from the trainer.
        """
        for name, now in engines.items():
            self._require_near(name, version, float(np.abs(now - trainer).mean()))
            if name in self.engines:
                self._require_new(name, version, trainer - self.trainer, now - self.engines[name])

    def require_sampled(
        self, version: int, pairs: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
    ) -> float:
        """Return the mean absolute difference of engines and trainer, in nats per token.

        `pairs` are the log-probabilities that each engine reports for its own responses, and the
        trainer's, both at the rollout temperature. Raises TrainingError if an engine is too far
        off.
        """
        apart = {name: float(np.abs(own - ours).mean()) for name, (own, ours) in pairs.items()}
        for name, distance in apart.items():
            self._require_near(name, version, distance)
        return sum(apart.values()) / max(len(apart), 1)

    def _require_near(self, name: str, version: int, distance: float) -> None:
        if not distance <= self.limit:
            raise TrainingError(
                f"{name} does not sample from version {version} of the policy: its "
                f"log-probabilities are {distance:.3g} nats per token from the trainer's, more "
                f"than rl.mismatch_limit={self.limit:g}",
                hint="it serves another base model, or reports log-probabilities at another "
                "temperature (--logprobs-mode), or keeps old weights",
            )

    def _require_new(self, name: str, version: int, moved: Numbers, engine: Numbers) -> None:
        changed, changed_there = np.count_nonzero(moved), np.count_nonzero(engine)
        frozen = changed >= max(_CHANGED, moved.size / 2) and changed_there <= _FROZEN * moved.size
        clear = np.abs(moved) > _CLEARLY * self.noise
        followed = (engine * np.sign(moved) > np.abs(moved) / 2)[clear]
        behind = clear.sum() >= _CLEAR and followed.mean() < _FOLLOWED
        if frozen or behind:
            raise TrainingError(
                f"{name} answers with an old version of the policy instead of version {version}: "
                f"of {moved.size} log-probabilities {changed} changed in the trainer and "
                f"{changed_there} in the engine, which followed {followed.sum()} of {clear.sum()} "
                "clear moves",
                hint="restart the server, if it is one; is another run using it?",
            )


def _trainer_scores(policy: Policy, probes: Sequence[Probe], temperature: float = 1.0) -> Numbers:
    """Return the trainer's log-probabilities of all responses, end to end. All ranks take part."""
    parts = [len(part) for probe in probes for part in probe]
    marks: NDArray[np.uint8] = np.repeat(np.array([0, 1] * len(probes), np.uint8), parts)
    examples = Examples.of_texts(
        [np.array(prompt + response) for prompt, response in probes], marks
    )
    row = pack(examples, range(len(probes))).to(policy.ranks.device)
    with evaluating(policy.engine):
        scores = policy.engine(row=row, outputs=TokenOutputs(temperature))
    numbers: Numbers = scores.double().cpu().numpy()
    return numbers


def _scores(probes: Sequence[Probe], engine: Engine) -> dict[str, Numbers]:
    """Return each engine's log-probabilities of all responses, end to end."""
    by_engine = engine.score([prompt + response for prompt, response in probes])
    return {
        name: np.concatenate([s[len(p[0]) - 1 :] for p, s in zip(probes, scores, strict=True)])
        for name, scores in by_engine.items()
    }
