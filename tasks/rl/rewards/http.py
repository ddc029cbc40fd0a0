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
from typing import TYPE_CHECKING, Any

from tasks.core.errors import RewardError
from tasks.core.redaction import redact_url
from tasks.process.output import Log
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.sources import describe, error_details, shortened, validate_rewards
from tasks.rl.settings import Reward

if TYPE_CHECKING:
    import httpx

TOKEN = "PLUMBLINE_REWARD_TOKEN"
FIRST_PAUSE_S = 0.5
"""Pause before the first retry; each later pause is twice as long."""
LONGEST_PAUSE_S = 30.0


class Unanswered(Exception):
    """One attempt failed; another one may succeed.

    Attributes:
        pause_s: the pause that the server asks for, or None.
    """

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Endpoint:
    """An HTTP server that returns rewards.

    Args:
        url: `reward.url` with its login and token.
        reward: section `reward`; `timeout_s` limits an attempt, and each wait for bytes in it.
        tokenizer: the policy's, to decode texts with special tokens.
        log: gets failed attempts.
    """

    def __init__(self, url: str, reward: Reward, tokenizer: Any, log: Log) -> None:
        import httpx

        self.label = f"reward.url={redact_url(url)}"
        self._url, self._tokenizer, self._log = url, tokenizer, log
        self._timeout_s, self._batch = reward.timeout_s, reward.batch
        self._attempts = 1 + reward.retries
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(timeout=self._timeout_s, headers=headers)

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the rewards of all responses, requested batch after batch."""
        rewards: list[float] = []
        for start in range(0, len(responses), self._batch):
            rewards += self._rewards(responses[start : start + self._batch])
        return rewards

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _rewards(self, responses: Sequence[Response]) -> list[float]:
        content = self._answer(responses)
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f'{self.label} does not answer {{"rewards": [...]}} but {_shown(content)}',
                details=[_batch_of(responses)],
                hint="the answer has to be JSON with one number per response",
            ) from error
        return validate_rewards(rewards, responses, self.label)

    def _answer(self, responses: Sequence[Response]) -> bytes:
        """Return the content of the first answer that succeeds."""
        body, attempts, pause_s = self._body(responses), self._attempts, FIRST_PAUSE_S
        for attempt in range(1, 1 + attempts):
            try:
                return self._post(body, responses)
            except Unanswered as error:
                if attempt == attempts:
                    raise RewardError(
                        f"{self.label} gave no rewards in {attempts} "
                        f"attempt{'s' * (attempts > 1)}: {error}",
                        details=[_batch_of(responses)],
                        hint="is the server up? see reward.timeout_s, reward.retries and "
                        "reward.batch",
                    ) from error
                self._log.warning("%s: attempt %d of %d: %s", self.label, attempt, attempts, error)
                asked_s = pause_s if error.pause_s is None else error.pause_s
                time.sleep(min(asked_s, LONGEST_PAUSE_S))
                pause_s *= 2
        raise AssertionError("an attempt returns or raises")

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

    def _post(self, body: bytes, responses: Sequence[Response]) -> bytes:
        """Return the content of the answer."""
        import httpx

        until = time.monotonic() + self._timeout_s
        content = bytearray()
        try:
            with self._client.stream("POST", self._url, content=body) as answer:
                for piece in answer.iter_bytes():
                    content += piece
                    if time.monotonic() > until:  # httpx limits each wait, not their sum
                        raise Unanswered(f"no whole answer within {self._timeout_s:g} s")
        except httpx.TransportError as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from error
        self._require_success(answer, bytes(content), responses)
        return bytes(content)

    def _require_success(
        self, answer: httpx.Response, content: bytes, responses: Sequence[Response]
    ) -> None:
        status = answer.status_code
        if 200 <= status < 300:
            return
        shown = f"status {status} {answer.reason_phrase}: {_shown(content)}"
        if status == 429 or status >= 500:
            raise Unanswered(shown, _retry_after(answer.headers.get("Retry-After")))
        moved = answer.headers.get("Location")
        raise RewardError(
            f"{self.label} refuses the request: {shown}",
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
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds)


def _shown(content: bytes) -> str:
    return shortened(content.decode(errors="replace").strip())
