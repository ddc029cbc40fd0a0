"""Episodes of several turns: the policy responds, the user's environment answers.

`rl.environment=path.py:Class` has one object of the class per episode; docs/online-rl.md describes
`reset`, `step` and `close`. An episode ends when the environment says so, after `rl.max_turns`
responses, or when `rollout.max_new_tokens`, which counts sampled tokens and observations, leaves no
room for an observation and one more token. The environment gets every response, also one that the
token limit cut off, so a long response never escapes its reward.

After a response, the chat template writes the rest of the assistant's turn, the observation as the
next message, and the generation prompt. These tokens are appended once; what was sampled stays as
it was sampled. This equals the context of a served model only if the template does not rewrite
earlier messages when a conversation goes on, so other templates are refused.

Every rank samples equally many turns, since engines have collective calls: a rank without running
episodes takes part with no requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.core.errors import ConfigError
from tasks.rl.metrics import Clock
from tasks.rl.responses import Prompt, Request, Response, Turn, request_seed
from tasks.rl.rewards import describe, error_details, is_finite_number, shortened
from tasks.rl.rollout.engine import Engine
from tasks.rl.user_code import Place, UserCode
from tasks.serving.vllm.colocation import Generated
from tasks.training.engine.deepspeed_engine import Ranks

NAME = "environment"
"""Name of its rewards among the parts."""
REPLIES = ("ok-reply", "<think>\nhm\n</think>\n\nok-reply")
"""Responses to try a template: some drop reasoning once the conversation goes on."""
FIRST, SECOND = "first-observation", "second-observation"


Outcome = tuple[str | None, float, bool]
"""Observation (None only if the episode is done), reward, and True if the episode is done."""


class EnvironmentProcess(UserCode):
    """The environments of a rank's episodes, by key of the episode, in a process of its own.

    A failure is a RewardError that names the prompt. It ends the run, so no environment outlives
    the process.
    """

    _prompts: Mapping[str, Prompt]  # of the running episodes

    def reset(self, prompts: Mapping[str, Prompt], seeds: Mapping[str, int]) -> None:
        """Begin episodes with these prompts and seeds."""
        self._prompts = prompts
        offered = {
            key: {**prompt.row, "prompt": prompt.messages, "seed": seeds[key]}
            for key, prompt in prompts.items()
        }
        place = partial(self._place, "reset", {})
        for key, value in self.ask("reset", offered, place).items():
            if value is not None:
                hint = "reset returns None: the first message is the prompt of the data"
                raise self.failure(f"returned {shortened(value)}", place(key), hint=hint)

    def step(self, texts: Mapping[str, str]) -> dict[str, Outcome]:
        """Give responses to their environments."""
        outcomes, place = dict[str, Outcome](), partial(self._place, "step", texts)
        for key, value in self.ask("step", texts, place).items():
            match value:
                case [str() | None as text, reward, bool(done)] if is_finite_number(reward) and (
                    text is not None or done
                ):
                    outcomes[key] = text, float(reward), done
                case _:
                    hint = "return observation (None only if done), reward, done (True or False)"
                    raise self.failure(f"returned {shortened(value)}", place(key), hint=hint)
        return outcomes

    def end(self) -> None:
        """Close the environments of all episodes."""
        self.ask("close", dict.fromkeys(self._prompts), partial(self._place, "close", {}))

    def _place(self, method: str, texts: Mapping[str, str], key: str) -> Place:
        prompt = self._prompts[key]
        return f"in {method} for {describe(prompt)}", error_details(prompt, texts.get(key))


@dataclass(frozen=True)
class ObservationTokens:
    """Renders observations."""

    tokenizer: Any  # has a chat template
    ends: Collection[int]  # ids that end a response
    role: str = "user"  # role of observations, `rl.observation_role`

    def require_stable(self, prompt: Prompt) -> None:
        """Raise a ConfigError if the chat template cannot be used; needs one prompt to try it."""
        try:
            begin = self._render(prompt)
            for reply in REPLIES:
                once = self._render(prompt, reply, FIRST)
                twice = self._render(prompt, reply, FIRST, reply, SECOND)
                rest = once.removeprefix(begin)
                blank = rest[: len(rest) - len(rest.lstrip())]
                after = rest[len(blank) + len(reply) :].replace(FIRST, SECOND)
                stays = once.startswith(begin + blank + reply)
                if not stays or twice != once + blank + reply + after:
                    raise self._refused(f"it rewrites earlier messages, as after {reply!r}")
            self.of(prompt, "observation")
        except TemplateError as error:
            raise self._refused(f"it rejects a message of role {self.role!r}: {error}") from error

    def of(self, prompt: Prompt, observation: str) -> NDArray[np.int32]:
        """Return the (o,) int32 token ids between a response's end token and the next response."""
        text = self._render(prompt, REPLIES[0], observation)
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        start = len(prompt.ids)
        ends = np.flatnonzero(np.isin(ids[start:], list(self.ends)))
        if not np.array_equal(ids[:start], prompt.ids) or not len(ends):
            raise self._refused(f"it changes the prompt, or ends no response with {self.ends}")
        return ids[start + int(ends[0]) + 1 :]

    def _render(self, prompt: Prompt, *turns: str) -> str:
        """Render the prompt, then responses and observations in turn, and a generation prompt."""
        roles = ("assistant", self.role) * len(turns)
        more = [{"role": r, "content": turn} for r, turn in zip(roles, turns, strict=False)]
        text: str = self.tokenizer.apply_chat_template(
            [*prompt.messages, *more],
            tools=prompt.row.get("tools") or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def _refused(self, reason: str) -> ConfigError:
        other = "tool" if self.role == "user" else "user"
        return ConfigError(
            f"rl.environment: the chat template cannot be used for several turns: {reason}",
            hint=f"rl.observation_role={other}, or data.chat_template=<Jinja file> that renders "
            "earlier messages always the same",
        )


@dataclass
class _Episode:
    """An episode in progress."""

    key: str  # identifies it among the episodes of this rank
    request: Request
    prompt: Prompt
    budget: int  # tokens after the prompt, sampled or observed
    context: NDArray[np.int32]  # (L,) token ids of prompt, responses and observations so far
    generated: list[Generated] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    done: bool = False  # True if the environment ended it

    @property
    def room(self) -> int:
        """Tokens that may still be sampled or observed."""
        return self.budget - (len(self.context) - len(self.prompt.ids))

    def next_request(self) -> Request:
        """Return the request for the next response, with a seed of its own."""
        seed = request_seed(self.request.seed, len(self.turns), self.request.number)
        return Request(self.context, seed, limit=self.room)

    def response(self) -> Response:
        """Return the finished episode."""
        generated = Generated(
            np.concatenate([each.ids for each in self.generated]),
            np.concatenate([each.logprobs for each in self.generated]),
            self.generated[-1].ended,
            min(each.version for each in self.generated),
        )
        return Response(self.prompt, generated, self.turns[-1].text, tuple(self.turns), self.done)


@dataclass(frozen=True)
class Episodes:
    """Plays episodes with a rollout engine and an environment."""

    engine: Engine
    environment: EnvironmentProcess
    observations: ObservationTokens  # renders observations; its tokenizer decodes responses
    ranks: Ranks
    max_turns: int  # responses of an episode, at most
    budget: int  # tokens of an episode after its prompt, `rollout.max_new_tokens`

    def play(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        clock: Clock,
        *,
        greedy: bool = False,
    ) -> list[Response]:
        """Return the finished episode of each request of this rank. All ranks take part."""
        episodes = [
            _Episode(str(n), request, prompt, self.budget, prompt.ids)
            for n, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        with clock.phase("environment"):
            self.environment.reset(
                {episode.key: episode.prompt for episode in episodes},
                {episode.key: episode.request.seed for episode in episodes},
            )
        running, asked = episodes, list(requests)
        for turn in count(1):
            with clock.phase("generate"):
                sampled = self.engine.generate(asked, greedy=greedy)
            with clock.phase("environment"):
                running = self._step(running, sampled, last=turn == self.max_turns)
            if not any(self.ranks.all_objects(bool(running))):
                break
            asked = [episode.next_request() for episode in running]
        self.environment.end()
        return [episode.response() for episode in episodes]

    def _step(
        self, running: Sequence[_Episode], sampled: Sequence[Generated], *, last: bool
    ) -> list[_Episode]:
        """Give responses to the environment; return the episodes that go on."""
        for episode, generated in zip(running, sampled, strict=True):
            text = self.observations.tokenizer.decode(generated.ids, skip_special_tokens=True)
            episode.generated.append(generated)
            episode.turns.append(Turn(text, len(generated.ids), 0.0))
            episode.context = np.concatenate([episode.context, generated.ids])
        outcomes = self.environment.step({e.key: e.turns[-1].text for e in running})
        return [e for e in running if self._observe(e, *outcomes[e.key], last=last)]

    def _observe(
        self, episode: _Episode, observation: str | None, reward: float, done: bool, *, last: bool
    ) -> bool:
        """Add the environment's answer to an episode; return True if another response follows."""
        turn = replace(episode.turns[-1], reward=reward)
        episode.turns[-1], episode.done = turn, done
        if done or last or not episode.generated[-1].ended:
            return False
        assert observation is not None
        ids = self.observations.of(episode.prompt, observation)
        if len(ids) >= episode.room:
            episode.generated[-1] = replace(episode.generated[-1], ended=False)
            return False
        message = {"role": self.observations.role, "content": observation}
        episode.turns[-1] = replace(turn, observation=message, ids=ids)
        episode.context = np.concatenate([episode.context, ids])
        return True
