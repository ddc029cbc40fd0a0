"""`rl.environment=path.py:Class`: the user's environment, one object of the class per episode.

    class Environment:
        def reset(self, answer): ...
        def step(self, text): return observation, reward, done

`reset` gets the columns of the prompt's row that it names (all with `**columns`), and `prompt`, the
messages, and `seed`, equal for all responses to a prompt. It returns None: the prompt comes from
the data. `step` gets a response as text and returns the next message (a text, or None if `done`),
the reward of this response, and True if the episode is over. Both may be `async`: then the calls of
a turn run concurrently. `close()` is called at the end of an episode if it exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.process.output import Log
from tasks.rl.experience.responses import Prompt
from tasks.rl.rewards.sources import describe, error_details, is_finite_number, shortened
from tasks.rl.user_code import FunctionReference, Place, UserCode

NAME = "environment"
"""Name of its rewards among the parts."""


class Outcome(NamedTuple):
    """The three values that `step` returns."""

    observation: str | None
    reward: float
    done: bool


class EnvironmentProcess(UserCode):
    """The environments of a rank's episodes, by key of the episode.

    A failure is a RewardError that names the prompt. It ends the run, so no environment outlives
    the process.
    """

    def __init__(
        self, reference: FunctionReference, *, timeout_s: float, log: Log, log_path: Path
    ) -> None:
        super().__init__(reference, timeout_s=timeout_s, log=log, log_path=log_path)
        self._prompts: dict[str, Prompt] = {}

    def reset(self, prompts: Mapping[str, tuple[Prompt, int]]) -> None:
        """Begin episodes with these prompts and seeds."""
        self._prompts |= {key: prompt for key, (prompt, _) in prompts.items()}
        offered = {
            key: {**prompt.row, "prompt": prompt.messages, "seed": seed}
            for key, (prompt, seed) in prompts.items()
        }
        for key, value in self._ask("reset", offered).items():
            if value is not None:
                raise self.failure(
                    f"returned {shortened(value)}",
                    self._place("reset", key),
                    hint="reset returns None: the first message is the prompt of the data",
                )

    def step(self, texts: Mapping[str, str]) -> dict[str, Outcome]:
        """Give responses to their environments."""
        outcomes = {}
        for key, value in self._ask("step", texts).items():
            if wrong := _fault(value):
                raise self.failure(
                    wrong,
                    self._place("step", key, texts[key]),
                    hint="return observation, reward, done: a text, a finite number, True or False",
                )
            observation, reward, done = value
            outcomes[key] = Outcome(observation, float(reward), done)
        return outcomes

    def end(self, keys: Sequence[str]) -> None:
        """Close the environments of episodes and let go of them."""
        self._ask("close", dict.fromkeys(keys))
        for key in keys:
            del self._prompts[key]

    def _ask(self, method: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        texts = calls if method == "step" else {}
        return self.ask(method, calls, lambda key: self._place(method, key, texts.get(key)))

    def _place(self, method: str, key: str, response: str | None = None) -> Place:
        prompt = self._prompts[key]
        return f"in {method} for {describe(prompt)}", error_details(prompt, response)


def _fault(value: Any) -> str:
    """Return what is wrong with the value of `step`; empty if it is as it has to be."""
    if not isinstance(value, list) or len(value) != 3:
        return f"returned {shortened(value)}, not three values"
    observation, reward, done = value
    if not isinstance(done, bool):
        return f"returned done={shortened(done)}, not True or False"
    if not is_finite_number(reward):
        return f"returned reward={shortened(reward)}, not a finite number"
    if not isinstance(observation, str) and not (observation is None and done):
        expected = "a text or None" if done else "a text, although the episode goes on"
        return f"returned observation={shortened(observation)}, not {expected}"
    return ""
