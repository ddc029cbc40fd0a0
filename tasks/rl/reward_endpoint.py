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
        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
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
        text = self._answer(responses)
        try:
            rewards = json.loads(text)["rewards"]
        except (ValueError, KeyError, TypeError):
            raise self._error(
                f"does not answer JSON with rewards but {shortened(text)}",
                responses,
                'answer {"rewards": [one number per response]}',
            ) from None
        return validate_rewards(rewards, responses, self.label)

    def _answer(self, responses: Sequence[Response]) -> str:
        """Return the text of the first attempt that succeeds."""
        body, attempts = self._body(responses), 1 + self._reward.retries
        for attempt in range(attempts):
            pause_s = FIRST_PAUSE_S * 2**attempt
            try:
                answer = self._client.post(self._url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return answer.text
                problem = f"status {answer.status_code}: {shortened(answer.text)}"
                if answer.status_code != 429 and answer.status_code < 500:
                    raise self._error(
                        f"refuses the request: {problem}", responses, "read the server's log"
                    )
                asked = answer.headers.get("Retry-After", "")
                pause_s = float(asked) if asked.replace(".", "", 1).isdecimal() else pause_s
            self._log.warning(
                "%s: attempt %d of %d: %s", self.label, attempt + 1, attempts, problem
            )
            if attempt + 1 < attempts:
                time.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise self._error(
            f"gave no rewards in {attempts} attempts: {problem}",
            responses,
            "is the server up? see reward.timeout_s, reward.retries and reward.batch",
        )

    def _body(self, responses: Sequence[Response]) -> dict[str, Any]:
        decode = self._tokenizer.decode
        rows = [dict(response.prompt.row) for response in responses]
        return {
            "query": [decode(response.ids.tolist()) for response in responses],
            "prompts": [decode(response.prompt.ids.tolist()) for response in responses],
            "completions": [response.text for response in responses],
            "labels": [row.get("answer") for row in rows],
            "rows": rows,
        }

    def _error(self, what: str, responses: Sequence[Response], hint: str) -> RewardError:
        first = responses[0]
        details = [
            f"batch of {len(responses)}, first {describe(first.prompt)}",
            *error_details(first.prompt, first.text),
        ]
        return RewardError(f"{self.label} {what}", details=details, hint=hint)
