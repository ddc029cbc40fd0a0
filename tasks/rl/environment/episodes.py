"""Sample and step all episodes of a rank, turn by turn.

An episode is prompt -> response -> observation -> response ... It ends when the environment says
so (`done`), after `rl.max_turns` responses, or when `rollout.max_new_tokens`, which counts sampled
tokens and observations, leaves no room for an observation and one more token. The environment gets
every response, also one that the token limit cut off, so a long response never escapes its reward.

Every rank samples equally many turns, since engines have collective calls: a rank without running
episodes takes part with no requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tasks.rl.clock import Clock
from tasks.rl.environment.observation_tokens import ObservationTokens
from tasks.rl.environment.process import EnvironmentProcess, Outcome
from tasks.rl.experience.prompts import request_seed
from tasks.rl.experience.responses import Prompt, Request, Response, Turn
from tasks.rl.rollout.engines import Engine
from tasks.serving.vllm.colocation import Generated
from tasks.training.engine.deepspeed_engine import Ranks


@dataclass
class _Episode:
    """An episode in progress.

    Attributes:
        key: identifies it among the episodes of this rank.
        number: among the responses to the prompt.
        budget: tokens after the prompt, sampled or observed.
        context: (L,) token ids of prompt, responses and observations so far.
        done: True if the environment ended it.
        open: True if another response follows.
    """

    key: str
    request: Request
    number: int
    prompt: Prompt
    budget: int
    context: NDArray[np.int32]
    generated: list[Generated] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    done: bool = False
    open: bool = True

    @property
    def room(self) -> int:
        """Tokens that may still be sampled or observed."""
        return self.budget - (len(self.context) - len(self.prompt.ids))

    def next_request(self) -> Request:
        """Return the request for the next response, with a seed of its own."""
        seed = request_seed(self.request.seed, len(self.turns), self.number)
        return Request(self.context, 1, seed, self.room)

    def take(self, generated: Generated, text: str) -> None:
        """Append a response."""
        self.generated.append(generated)
        self.turns.append(Turn(text, len(generated.ids), 0.0))
        self.context = np.concatenate([self.context, generated.ids])

    def response(self) -> Response:
        """Return the finished episode."""
        return Response(
            self.prompt,
            Generated(
                np.concatenate([generated.ids for generated in self.generated]),
                np.concatenate([generated.logprobs for generated in self.generated]),
                self.generated[-1].ended,
                min(generated.version for generated in self.generated),
            ),
            self.turns[-1].text,
            tuple(self.turns),
            self.done,
        )


@dataclass(frozen=True)
class Episodes:
    """Plays episodes with a rollout engine and an environment.

    Attributes:
        observations: renders observations; its tokenizer decodes responses.
        max_turns: responses of an episode, at most.
        budget: tokens of an episode after its prompt, `rollout.max_new_tokens`.
    """

    engine: Engine
    environment: EnvironmentProcess
    observations: ObservationTokens
    ranks: Ranks
    max_turns: int
    budget: int

    def play(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        clock: Clock,
        *,
        greedy: bool = False,
    ) -> list[list[Response]]:
        """Return the finished episodes of each request. All ranks take part.

        Args:
            requests: of the first turn, of this rank; may be empty.
            prompts: of the requests.
            clock: gets the seconds of `generate` and `environment`.
            greedy: take the most likely token instead of sampling.
        """
        by_request = [
            [
                _Episode(f"{n}-{i}", request, i, prompt, self.budget, prompt.ids)
                for i in range(request.samples)
            ]
            for n, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        episodes = [episode for group in by_request for episode in group]
        with clock.phase("environment"):
            self.environment.reset({e.key: (e.prompt, e.request.seed) for e in episodes})
        running, asked = episodes, list(requests)
        for turn in count(1):
            with clock.phase("generate"):
                generated = self.engine.generate(asked, greedy=greedy)
            sampled = (response for responses in generated for response in responses)
            with clock.phase("environment"):
                running = list(self._step(running, sampled, last=turn == self.max_turns))
            if not any(self.ranks.all_objects(bool(running))):
                break
            asked = [episode.next_request() for episode in running]
        self.environment.end([episode.key for episode in episodes])
        return [[episode.response() for episode in group] for group in by_request]

    def _step(
        self, running: Sequence[_Episode], sampled: Iterator[Generated], *, last: bool
    ) -> Iterator[_Episode]:
        """Give responses to the environment; yield the episodes that go on."""
        for episode, generated in zip(running, sampled, strict=True):
            text = self.observations.tokenizer.decode(generated.ids, skip_special_tokens=True)
            episode.take(generated, text)
        outcomes = self.environment.step({e.key: e.turns[-1].text for e in running})
        for episode in running:
            self._observe(episode, outcomes[episode.key], last=last)
            if episode.open:
                yield episode

    def _observe(self, episode: _Episode, outcome: Outcome, *, last: bool) -> None:
        turn = replace(episode.turns[-1], reward=outcome.reward)
        episode.turns[-1], episode.done = turn, outcome.done
        episode.open = not (outcome.done or last) and episode.generated[-1].ended
        if not episode.open:
            return
        assert outcome.observation is not None
        ids = self.observations.of(episode.prompt, outcome.observation)
        if len(ids) >= episode.room:
            episode.generated[-1] = replace(episode.generated[-1], ended=False)
            episode.open = False
            return
        message = {"role": self.observations.role, "content": outcome.observation}
        episode.turns[-1] = replace(turn, observation=message, ids=ids)
        episode.context = np.concatenate([episode.context, ids])
