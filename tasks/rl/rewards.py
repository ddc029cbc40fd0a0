"""Rewards of responses: a reward model, a Python function, an HTTP endpoint, or their weighted sum.

    with open_rewards(reward, tokenizer=tokenizer, device=device, log=log, logs=logs) as rewards:
        total, parts = rewards.score(responses)

A source with weight 0 is recorded but does not count. A source that returns NaN, None or too few
numbers is a `RewardError` that shows the prompt. `reward_model.py` has the reward model,
`reward_endpoint.py` the endpoint; here are functions.

`reward.function=path.py:name`, and `eval.function`: a Python function of the user, with the
signature of TRL.

    def score(prompts, completions, completion_ids, **columns) -> list[float]

All arguments are lists with one element per response: `prompts` conversations (lists of messages),
`completions` conversations of one assistant message (with an environment, of all responses and
observations), `completion_ids` the sampled token ids, and every column of the data by its name
(`answer`, `id`, ...). The function names those it wants, or takes all with
`**kwargs`. It may be `async`. It returns one number per response; true and false are numbers.

Unlike in TRL, None is an error, and there are no `trainer_state`, `log_extra` and `log_metric`: the
function runs in a process of its own, which is killed if it hangs.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError, RewardError
from tasks.process.output import Log
from tasks.rl.responses import Prompt, Response
from tasks.rl.settings import Reward
from tasks.rl.user_code import ENVIRONMENT, FunctionReference, Place, UserCode
from tasks.serving.text import matches
from tasks.training.job import REWARD_URL

if TYPE_CHECKING:
    import torch

FUNCTION_LOG = "reward_function.log"
SHOWN = 200
"""Characters of a prompt or response in an error."""
EXACT_MATCH = "exact_match"
"""Value of `reward.function` for `ExactMatch`."""
ANSWER = "answer"
"""Column with the answer."""
OWN_NAMES = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that are not passed on: their names are those of arguments."""


class Weighted(NamedTuple):
    """A source of rewards and its weight in the sum.

    The source is called with responses and returns the reward of each; it has a method `close`.
    """

    name: str  # name of the part: `model`, `function` or `url`, as in section `reward`
    weight: float  # factor of its rewards
    source: Any


class Rewards:
    """All reward sources of a run; none if an environment gives the rewards. A context manager."""

    def __init__(self, sources: Sequence[Weighted] = ()) -> None:
        self.sources: list[Weighted] = []
        self._closing = ExitStack()
        for weighted in sources:
            self.add(weighted.name, weighted.weight, weighted.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def add(self, name: str, weight: float, source: Any) -> None:
        """Add a source, which is closed with the others."""
        self._closing.callback(source.close)
        self.sources.append(Weighted(name, weight, source))

    def score(
        self, responses: Sequence[Response]
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Return the (S,) weighted sums, and the (S,) unweighted rewards by name of the source."""
        total: NDArray[np.float64] = np.zeros(len(responses), np.float64)
        parts: dict[str, NDArray[np.float64]] = {}
        for each in self.sources:
            parts[each.name] = np.array(each.source(responses) if responses else [], np.float64)
            total += each.weight * parts[each.name]
        return total, parts


def open_rewards(
    reward: Reward,
    *,
    tokenizer: Any,
    device: torch.device,
    log: Log,
    logs: Path,
    required: bool = True,
) -> Rewards:
    """Open all configured sources, so that errors show before the first rollout.

    Beside an environment none is `required`. `logs` is the folder for complete outputs.
    """
    with ExitStack() as opened:
        rewards = opened.enter_context(Rewards())
        if reward.function == EXACT_MATCH:
            rewards.add("function", reward.function_weight, ExactMatch())
        elif reward.function is not None:
            reference, path = FunctionReference.of(reward.function), logs / FUNCTION_LOG
            function = Function(reference, timeout_s=reward.timeout_s, log=log, log_path=path)
            rewards.add("function", reward.function_weight, function)
        if reward.model is not None:
            from tasks.rl.reward_model import RewardModel

            folder = Path(str(reward.model))
            model = RewardModel(folder, tokenizer, device, normalize=reward.normalize, log=log)
            rewards.add("model", reward.model_weight, model)
        if reward.url is not None:
            from tasks.rl.reward_endpoint import Endpoint

            url = os.environ.get(REWARD_URL, reward.url)
            rewards.add("url", reward.url_weight, Endpoint(url, reward, tokenizer, log))
        if required and not rewards.sources:
            raise ConfigError(
                "no reward source: reward.model, reward.function and reward.url are all unset",
                hint="reward.model=<folder>, reward.function=<path.py>:<name> or reward.url=<URL>",
            )
        opened.pop_all()
    return rewards


def sources_digest(reward: Mapping[str, Any], environment: str | None = None) -> str:
    """Return the digest of the user's sources for the key of a stage; empty without any.

    They are the files of the function and the environment, and the folder of the reward model.
    """
    from tasks.rl.reward_model import folder_identity

    parts = []
    if environment:
        parts.append(FunctionReference.of(environment, ENVIRONMENT).digest())
    if reward["function"] and reward["function"] != EXACT_MATCH:
        parts.append(FunctionReference.of(reward["function"]).digest())
    if reward["model"]:
        parts += folder_identity(Path(reward["model"]).expanduser())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


class Function(UserCode):
    """A function of the user as a reward source."""

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Call the function once with all responses."""
        first = responses[0]
        place: Place = (
            f"on {len(responses)} responses, first {describe(first.prompt)}",
            error_details(first.prompt, first.text),
        )
        values = self.ask("call", {"": _keywords(responses)}, lambda _: place)
        return validate_rewards(values[""], responses, self.label)


def _keywords(responses: Sequence[Response]) -> dict[str, Any]:
    rows = [response.prompt.row for response in responses]
    names = dict.fromkeys(name for row in rows for name in row if name not in OWN_NAMES)
    return {
        "prompts": [response.prompt.messages for response in responses],
        "completions": [response.messages for response in responses],
        "completion_ids": [response.generated.ids.tolist() for response in responses],
        **{name: [row.get(name) for row in rows] for name in names},
    }


class ExactMatch:
    """1 if the response is the row's answer, else 0; compares texts as smoke_eval does."""

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return 1 or 0 for each response; a RewardError names a row without `answer`."""
        for response in responses:
            row = response.prompt.row
            if not isinstance(row.get(ANSWER), str):
                raise RewardError(
                    f"reward.function={EXACT_MATCH}: row {row.get('id')} has no text {ANSWER!r}",
                    details=error_details(response.prompt, response.text),
                    hint=f"give every row of the data an {ANSWER!r}, or use another function",
                )
        return [float(matches(each.text, each.prompt.row[ANSWER])) for each in responses]

    def close(self) -> None:
        """Nothing to close."""


def validate_rewards(rewards: object, responses: Sequence[Response], label: str) -> list[float]:
    """Return a source's rewards if they are one finite number per response.

    True and false count as 1 and 0.
    """
    first = responses[0]
    if not isinstance(rewards, list):
        wrong = f"{shortened(rewards)}, not a list of numbers"
    elif len(rewards) != len(responses):
        wrong = f"{len(rewards)} rewards for {len(responses)} responses"
    else:
        bad = [number for number, value in enumerate(rewards) if not is_finite_number(value)]
        if not bad:
            return [float(value) for value in rewards]
        first = responses[bad[0]]
        wrong = f"{shortened(rewards[bad[0]])} for {describe(first.prompt)}"
    raise RewardError(
        f"{label} gave {wrong}",
        details=error_details(first.prompt, first.text),
        hint="return a list with a finite number for each completion, in their order; "
        "where a rule does not apply, 0",
    )


def is_finite_number(value: object) -> bool:
    """Return True for a finite int, float or bool."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int with hundreds of digits
        return False


def describe(prompt: Prompt) -> str:
    """Return the id of a prompt's row and the start of its last message."""
    return f"{prompt.row.get('id', 'a row without id')}: {_last_message(prompt)[:60]!r}"


def error_details(prompt: Prompt, response: str | None = None) -> list[str]:
    """Return the lines of an error that show a prompt and its response."""
    lines = [f"row: {prompt.row.get('id')}", f"prompt: {shortened(_last_message(prompt))}"]
    return lines if response is None else [*lines, f"response: {shortened(response)}"]


def shortened(value: object) -> str:
    """Return the start of a value's representation."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def _last_message(prompt: Prompt) -> str:
    return str(prompt.messages[-1]["content"]) if prompt.messages else ""
