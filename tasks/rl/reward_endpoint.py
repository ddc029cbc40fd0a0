"""`reward.url`: an HTTP endpoint that scores batches of responses.

It gets a POST of JSON in which each field is a list with one element per response:

    query         prompt and response as one text, as the policy saw it, with special tokens
    prompts       the prompt in the same way
    completions   the response's text alone
    labels        the row's `answer`; null if it has none
    rows          the rows of the data

It answers `{"rewards": [one number per response]}`. Servers for OpenRLHF's `remote_rm_url`, which
read `query`, `prompts` and `labels`, work as they are. A token in the environment variable
`PLUMBLINE_REWARD_TOKEN` is sent as `Authorization: Bearer`. A login and a token in the URL work,
too; they are in no record of the run, and not part of a stage's key.

A failed connection, a timeout, and the statuses 429 and 5xx are retried. Other errors end the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tasks.core.errors import RewardError
from tasks.core.redaction import redact_url
from tasks.process.output import Log
from tasks.rl.responses import Response
from tasks.rl.rewards import describe, error_details, shortened, validate_rewards
from tasks.rl.settings import Reward

TOKEN = "PLUMBLINE_REWARD_TOKEN"
FIRST_PAUSE_S = 0.5
"""Pause before the first retry; each later pause is twice as long."""
LONGEST_PAUSE_S = 30.0


class Endpoint:
    """An HTTP server that returns rewards; the URL has its login and token."""

    def __init__(self, url: str, reward: Reward, tokenizer: Any, log: Log) -> None:
        self.label = f"reward.url={redact_url(url)}"
        self._url, self._reward, self._tokenizer, self._log = url, reward, tokenizer, log
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(timeout=reward.timeout_s, headers=headers)

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the rewards of all responses, requested batch after batch."""
        size = self._reward.batch
        batches = (responses[i : i + size] for i in range(0, len(responses), size))
        return [reward for batch in batches for reward in self._rewards(batch)]

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _rewards(self, responses: Sequence[Response]) -> list[float]:
        content = self._answer(responses)
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f'{self.label} does not answer {{"rewards": [...]}} but {shortened(content)}',
                details=[_batch_of(responses)],
                hint="the answer has to be JSON with one number per response",
            ) from error
        return validate_rewards(rewards, responses, self.label)

    def _answer(self, responses: Sequence[Response]) -> str:
        """Return the text of the first attempt that succeeds."""
        body, attempts, pause_s = self._body(responses), 1 + self._reward.retries, FIRST_PAUSE_S
        for attempt in range(1, 1 + attempts):
            asked_s = None
            try:
                answer = self._client.post(self._url, content=body)
                if answer.is_success:
                    return answer.text
                problem = (
                    f"status {answer.status_code} {answer.reason_phrase}: {shortened(answer.text)}"
                )
                if answer.status_code != 429 and answer.status_code < 500:
                    raise self._refused(answer, problem, responses)
                asked_s = _retry_after(answer.headers.get("Retry-After"))
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            self._log.warning("%s: attempt %d of %d: %s", self.label, attempt, attempts, problem)
            if attempt < attempts:
                time.sleep(min(pause_s if asked_s is None else asked_s, LONGEST_PAUSE_S))
                pause_s *= 2
        raise RewardError(
            f"{self.label} gave no rewards in {attempts} attempt{'s' * (attempts > 1)}: {problem}",
            details=[_batch_of(responses)],
            hint="is the server up? see reward.timeout_s, reward.retries and reward.batch",
        )

    def _body(self, responses: Sequence[Response]) -> bytes:
        decode = self._tokenizer.decode
        rows = [dict(response.prompt.row) for response in responses]
        body = {
            "query": [decode(response.ids.tolist()) for response in responses],
            "prompts": [decode(response.prompt.ids.tolist()) for response in responses],
            "completions": [response.text for response in responses],
            "labels": [row.get("answer") for row in rows],
            "rows": rows,
        }
        return json.dumps(body).encode()

    def _refused(
        self, answer: httpx.Response, problem: str, responses: Sequence[Response]
    ) -> RewardError:
        moved = answer.headers.get("Location")
        return RewardError(
            f"{self.label} refuses the request: {problem}",
            details=[
                _batch_of(responses),
                *error_details(responses[0].prompt, responses[0].text),
            ],
            hint=f"reward.url={redact_url(moved)}" if moved else "read the server's log",
        )


def _batch_of(responses: Sequence[Response]) -> str:
    return f"batch of {len(responses)}, first {describe(responses[0].prompt)}"


def _retry_after(text: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None for a date, which servers hardly use."""
    try:
        return max(0.0, float(text or ""))
    except ValueError:
        return None
