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

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.errors import RewardError
from tasks.process.output import Log
from tasks.rl.experience.responses import Prompt
from tasks.rl.rewards.reference import ENVIRONMENT, FunctionReference
from tasks.rl.rewards.user_code import UserCode
from tasks.toy import calculator

CALCULATOR = "calculator"
METHODS = ("reset", "step")
NAME = "environment"
"""Name of its rewards among the parts."""
SHOWN = 200
"""Characters of a text in an error."""
STEP_HINT = "return observation, reward, done: a text, a finite number, True or False"


def reference_of(text: str) -> FunctionReference:
    """Return the class that `rl.environment` names; `calculator` is the toy's.

    Raises:
        ConfigError: not of the form path.py:name.
    """
    if text == CALCULATOR:
        return FunctionReference(Path(calculator.__file__), "Calculator", ENVIRONMENT)
    return FunctionReference.of(text, ENVIRONMENT)


class Outcome(NamedTuple):
    """The three values that `step` returns."""

    observation: str | None
    reward: float
    done: bool


class EnvironmentProcess(UserCode):
    """The environments of a rank's episodes, in a child process.

    Episodes have keys. A failure ends the run, so no environment outlives the process.

    Args:
        reference: file and class.
        timeout_s: for all calls of a turn.
        log: gets the output of the environments.
        log_path: file for the complete output.

    Raises:
        ConfigError: the file does not exist or has no such name.
    """

    def __init__(
        self, reference: FunctionReference, *, timeout_s: float, log: Log, log_path: Path
    ) -> None:
        reference.require_methods(METHODS)
        super().__init__(
            reference,
            "tasks.rl.environment.child",
            timeout_s=timeout_s,
            timeout_key="rl.environment_timeout_s",
            log=log,
            log_path=log_path,
            on_event=self._note,
        )
        self._prompts: dict[str, Prompt] = {}
        self._at = ""

    def reset(self, prompts: Mapping[str, tuple[Prompt, int]]) -> None:
        """Begin episodes.

        Args:
            prompts: prompt and seed of each episode, by key.

        Raises:
            RewardError: `reset` failed or returned something; names the prompt.
        """
        self._prompts |= {key: prompt for key, (prompt, _) in prompts.items()}
        offered = {
            key: {**prompt.row, "prompt": prompt.messages, "seed": seed}
            for key, (prompt, seed) in prompts.items()
        }
        for key, value in self._call("reset", offered):
            if value is not None:
                raise self._wrong(
                    key,
                    f"reset returned {_short(value)}",
                    hint="reset returns None: the first message is the prompt of the data",
                )

    def step(self, texts: Mapping[str, str]) -> dict[str, Outcome]:
        """Give responses to their environments.

        Args:
            texts: responses by key of the episode.

        Raises:
            RewardError: `step` failed or returned something else; names the prompt.
        """
        results = self._call("step", texts)
        return {key: self._outcome(key, value, texts[key]) for key, value in results}

    def end(self, keys: Sequence[str]) -> None:
        """Close the environments of episodes and let go of them.

        Raises:
            RewardError: `close` failed; names the prompt.
        """
        list(self._call("close", dict.fromkeys(keys)))
        for key in keys:
            del self._prompts[key]

    def _note(self, event: Mapping[str, Any]) -> None:
        self._at = event.get("episode", "")

    def _call(self, method: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what each call returned, by key, in order; raise the first failure."""
        if not arguments:
            return
        texts = arguments if method == "step" else {}
        self._at = ""

        def where() -> tuple[str, list[str]]:
            if self._at not in self._prompts:
                return f"before {method} was called", []
            return f"in {method} {self._describe(self._at)}", self._lines(self._at, texts)

        answer = self.ask({"method": method, "calls": list(arguments.items())}, where)
        if "failure" in answer:  # the file was not loaded before
            what, *trace = answer["failure"]
            raise RewardError(
                f"{self.label} failed: {what}", details=trace, hint=answer.get("hint", "")
            )
        for key, result in zip(arguments, answer["results"], strict=True):
            if "failure" in result:
                what, *trace = result["failure"]
                raise self._wrong(
                    key, f"{method} failed: {what}", texts, trace, hint=result["hint"]
                )
            yield key, result["value"]

    def _outcome(self, key: str, value: Any, text: str) -> Outcome:
        wrong = _fault(value)
        if wrong:
            raise self._wrong(key, f"step {wrong}", {key: text}, hint=STEP_HINT)
        observation, reward, done = value
        return Outcome(observation, float(reward), done)

    def _wrong(
        self,
        key: str,
        what: str,
        texts: Mapping[str, str] | None = None,
        trace: Sequence[str] = (),
        *,
        hint: str,
    ) -> RewardError:
        message = f"{self.label}: {what}, {self._describe(key)}"
        return RewardError(message, details=[*self._lines(key, texts or {}), *trace], hint=hint)

    def _describe(self, key: str) -> str:
        prompt = self._prompts[key]
        return f"for {prompt.row.get('id', 'a row without id')}: {_last(prompt)[:60]!r}"

    def _lines(self, key: str, texts: Mapping[str, str]) -> list[str]:
        prompt = self._prompts[key]
        lines = [f"row: {prompt.row.get('id')}", f"prompt: {_short(_last(prompt))}"]
        return lines + ([f"response: {_short(texts[key])}"] if key in texts else [])


def _fault(value: Any) -> str:
    """Return what is wrong with the value of `step`; empty if it is as it has to be."""
    if not isinstance(value, list) or len(value) != 3:
        return f"returned {_short(value)}, not three values"
    observation, reward, done = value
    if not isinstance(done, bool):
        return f"returned done={_short(done)}, not True or False"
    if not isinstance(reward, int | float) or not _finite(reward):
        return f"returned reward={_short(reward)}, not a finite number"
    if not isinstance(observation, str) and not (observation is None and done):
        expected = "a text or None" if done else "a text, although the episode goes on"
        return f"returned observation={_short(observation)}, not {expected}"
    return ""


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int with hundreds of digits
        return False


def _last(prompt: Prompt) -> str:
    return str(prompt.messages[-1]["content"]) if prompt.messages else ""


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
