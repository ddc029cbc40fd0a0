"""Rewards of responses: a reward model, a Python function, an HTTP endpoint, or their weighted sum.

    with open_rewards(reward, tokenizer=tokenizer, device=device, log=log, logs=logs) as rewards:
        total, parts = rewards.score(responses)

A source with weight 0 is recorded but does not count. A source that returns NaN, None or too few
numbers is a `RewardError` that shows the prompt. `reward_model.py` has the reward model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.errors import RewardError
from tasks.core.redaction import redact_url
from tasks.process.output import Log
from tasks.rl.responses import Prompt, Response
from tasks.rl.settings import Reward
from tasks.rl.user_code import ENVIRONMENT, FunctionReference, Place, UserCode
from tasks.serving.prompts import matches
from tasks.training.job import REWARD_URL

if TYPE_CHECKING:
    import torch

SHOWN = 200
"""Characters of a prompt or response in an error."""
EXACT_MATCH = "exact_match"
"""Value of `reward.function` for `exact_matches`."""
OWN_NAMES = ("prompt", "completion", "prompts", "completions", "completion_ids")
"""Columns that are not passed on: their names are those of arguments."""
TOKEN = "PLUMBLINE_REWARD_TOKEN"
FIRST_PAUSE_S = 0.5
"""Pause before the first retry; each later pause is twice as long."""


class Weighted(NamedTuple):
    """A source of rewards and its weight in the sum."""

    name: str  # name of the part: `model`, `function` or `url`, as in section `reward`
    weight: float  # factor of its rewards
    source: Callable[[Sequence[Response]], list[float]]  # returns the reward of each response


@dataclass(frozen=True)
class Rewards:
    """All reward sources of a run; none if an environment gives the rewards."""

    sources: Sequence[Weighted] = ()

    def score(self, responses: Sequence[Response]) -> list[Response]:
        """Return the responses with their rewards: the weighted sum, and each source's own."""
        parts = {each.name: each.source(responses) for each in self.sources if responses}
        scored = []
        for i, response in enumerate(responses):
            total = 0.0
            for name, weight, _ in self.sources:
                total += weight * parts[name][i]
            own = {name: values[i] for name, values in parts.items()}
            scored.append(replace(response, reward=total, parts=own))
        return scored


@contextmanager
def open_rewards(
    reward: Reward, *, tokenizer: Any, device: torch.device, log: Log, logs: Path
) -> Iterator[Rewards]:
    """Open all configured sources, so that errors show before the first rollout.

    `logs` is the folder for the complete output of a function.
    """
    sources: list[Weighted] = []
    with ExitStack() as stack:
        if reward.function == EXACT_MATCH:
            sources.append(Weighted("function", reward.function_weight, exact_matches))
        elif reward.function is not None:
            reference, path = FunctionReference.of(reward.function), logs / "reward_function.log"
            function = Function(reference, timeout_s=reward.timeout_s, log=log, log_path=path)
            stack.callback(function.close)
            sources.append(Weighted("function", reward.function_weight, function))
        if reward.model is not None:
            from tasks.rl.reward_model import RewardModel

            folder = Path(str(reward.model))
            model = RewardModel(folder, tokenizer, device, normalize=reward.normalize, log=log)
            sources.append(Weighted("model", reward.model_weight, model))
        if reward.url is not None:
            url = os.environ.get(REWARD_URL, reward.url)
            endpoint = Endpoint(url, reward, tokenizer, log)
            stack.callback(endpoint.close)
            sources.append(Weighted("url", reward.url_weight, endpoint))
        yield Rewards(sources)


def sources_digest(reward: Mapping[str, Any], environment: str | None = None) -> str:
    """Return the digest of the user's sources for the key of a stage; empty without any.

    They are the files of the function and the environment, and the folder of the reward model.
    """
    from tasks.rl.reward_model import model_digest

    parts = []
    if environment:
        parts.append(FunctionReference.of(environment, ENVIRONMENT).digest())
    if reward["function"] and reward["function"] != EXACT_MATCH:
        parts.append(FunctionReference.of(reward["function"]).digest())
    if reward["model"]:
        parts.append(model_digest(Path(reward["model"])))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


class Function(UserCode):
    """A function of the user as a reward source, with the signature of TRL.

        def score(prompts, completions, completion_ids, **columns) -> list[float]

    All arguments are lists with one element per response: `prompts` conversations (lists of
    messages), `completions` conversations of one assistant message (with an environment, of all
    responses and observations), `completion_ids` the sampled token ids, and every column of the
    data by its name. The function names those it wants, or takes all with `**kwargs`. It may be
    `async`. Unlike in TRL, None is an error, and there are no `trainer_state`, `log_extra` and
    `log_metric`.
    """

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Call the function once with all responses."""
        first = responses[0]
        place: Place = (
            f"on {len(responses)} responses, first {describe(first.prompt)}",
            error_details(first.prompt, first.text),
        )
        rows = [response.prompt.row for response in responses]
        names = dict.fromkeys(name for row in rows for name in row if name not in OWN_NAMES)
        keywords = {
            "prompts": [response.prompt.messages for response in responses],
            "completions": [response.messages for response in responses],
            "completion_ids": [response.generated.ids.tolist() for response in responses],
            **{name: [row.get(name) for row in rows] for name in names},
        }
        values = self.ask("call", {"": keywords}, lambda _: place)
        return validate_rewards(values[""], responses, self.label)


def exact_matches(responses: Sequence[Response]) -> list[float]:
    """Return 1 for each response that is the row's `answer`, else 0; as smoke_eval compares.

    A RewardError names a row without `answer`.
    """
    for response in responses:
        row = response.prompt.row
        if not isinstance(row.get("answer"), str):
            raise RewardError(
                f"reward.function={EXACT_MATCH}: row {row.get('id')} has no text 'answer'",
                details=error_details(response.prompt, response.text),
                hint="give every row of the data an 'answer', or use another function",
            )
    return [float(matches(each.text, each.prompt.row["answer"])) for each in responses]


class Endpoint:
    """`reward.url`: an HTTP endpoint that scores batches of responses.

    It gets a POST of JSON in which each field is a list with one element per response:

        query         prompt and response as one text, as the policy saw it, with special tokens
        prompts       the prompt in the same way
        completions   the response's text alone
        labels        the row's `answer`; null if it has none
        rows          the rows of the data

    It answers `{"rewards": [one number per response]}`. Servers for OpenRLHF's `remote_rm_url`,
    which read `query`, `prompts` and `labels`, work as they are. A token in the environment
    variable `PLUMBLINE_REWARD_TOKEN` is sent as `Authorization: Bearer`; a login and a token in the
    URL work, too, and are in no record of the run. A failed connection, a timeout, and the statuses
    429 and 5xx are retried.
    """

    def __init__(self, url: str, reward: Reward, tokenizer: Any, log: Log) -> None:
        import httpx  # here, since the preflight imports this module

        self.label = f"reward.url={redact_url(url)}"
        self._url, self._reward, self._tokenizer, self._log = url, reward, tokenizer, log
        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(timeout=reward.timeout_s, headers=headers)

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the rewards of all responses, requested batch after batch."""
        size, rewards = self._reward.batch, list[float]()
        for batch in (responses[i : i + size] for i in range(0, len(responses), size)):
            text = self._answer(batch)
            try:
                answered = json.loads(text)["rewards"]
            except (ValueError, KeyError, TypeError):
                hint = 'answer {"rewards": [one number per response]}'
                what = f"does not answer JSON with rewards but {shortened(text)}"
                raise self._error(what, batch, hint) from None
            rewards += validate_rewards(answered, batch, self.label)
        return rewards

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _answer(self, responses: Sequence[Response]) -> str:
        """Return the text of the first attempt that succeeds."""
        import httpx

        decode, attempts = self._tokenizer.decode, 1 + self._reward.retries
        rows = [dict(response.prompt.row) for response in responses]
        body = {
            "query": [decode(response.ids.tolist()) for response in responses],
            "prompts": [decode(response.prompt.ids.tolist()) for response in responses],
            "completions": [response.text for response in responses],
            "labels": [row.get("answer") for row in rows],
            "rows": rows,
        }
        for attempt in range(attempts):
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) if attempt else 0)
            try:
                answer = self._client.post(self._url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return answer.text
                problem = f"status {answer.status_code}: {shortened(answer.text)}"
                if answer.status_code != 429 and answer.status_code < 500:
                    what = f"refuses the request: {problem}"
                    raise self._error(what, responses, "read the server's log")
            self._log.warning(
                "%s: attempt %d of %d: %s", self.label, attempt + 1, attempts, problem
            )
        raise self._error(
            f"gave no rewards in {attempts} attempts: {problem}",
            responses,
            "is the server up? see reward.timeout_s, reward.retries and reward.batch",
        )

    def _error(self, what: str, responses: Sequence[Response], hint: str) -> RewardError:
        details = error_details(responses[0].prompt, responses[0].text)
        return RewardError(f"{self.label} {what}", details=details, hint=hint)


def validate_rewards(rewards: object, responses: Sequence[Response], label: str) -> list[float]:
    """Return a source's rewards if they are one finite number per response.

    True and false count as 1 and 0.
    """
    first = responses[0]
    if not isinstance(rewards, list):
        wrong = f"{shortened(rewards)}, not a list of numbers"
    elif len(rewards) != len(responses):
        wrong = f"{len(rewards)} rewards for {len(responses)} responses"
    elif bad := [number for number, value in enumerate(rewards) if not is_finite_number(value)]:
        first = responses[bad[0]]
        wrong = f"{shortened(rewards[bad[0]])} for {describe(first.prompt)}"
    else:
        return [float(value) for value in rewards]
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
    return f"{prompt.row.get('id', 'a row without id')}: {_asked(prompt)[:60]!r}"


def error_details(prompt: Prompt, response: str | None = None) -> list[str]:
    """Return the lines of an error that show a prompt and its response."""
    lines = [f"row: {prompt.row.get('id')}", f"prompt: {shortened(_asked(prompt))}"]
    return lines if response is None else [*lines, f"response: {shortened(response)}"]


def shortened(value: object) -> str:
    """Return the start of a value's representation."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def _asked(prompt: Prompt) -> str:
    return str(prompt.messages[-1]["content"]) if prompt.messages else ""
