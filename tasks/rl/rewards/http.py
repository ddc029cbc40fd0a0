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

import asyncio
import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.core.errors import RewardError
from tasks.core.redaction import redact_url
from tasks.process.output import Log
from tasks.rl.experience.responses import Response
from tasks.rl.rewards.sources import describe, error_details, validate_rewards

if TYPE_CHECKING:
    import httpx

TOKEN = "PLUMBLINE_REWARD_TOKEN"
FIRST_PAUSE_S = 0.5
"""Pause before the first retry; each later pause is twice as long."""
LONGEST_PAUSE_S = 30.0
LONGEST_ANSWER = 64 << 20
"""Bytes."""
SHOWN = 300


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
        url: http or https.
        tokenizer: the policy's, to decode texts with special tokens.
        timeout_s: limit for a whole attempt, from connecting to the last byte.
        retries: further attempts per batch.
        batch: responses per request.
        log: gets failed attempts.
    """

    def __init__(
        self, url: str, *, tokenizer: Any, timeout_s: float, retries: int, batch: int, log: Log
    ) -> None:
        import httpx

        self.label = f"reward.url={redact_url(url)}"
        self._url, self._tokenizer, self._log = url, tokenizer, log
        self._timeout_s, self._retries, self._batch = timeout_s, retries, batch
        token = os.environ.get(TOKEN)
        # httpx limits each read. A server that sends byte after byte is bounded by asyncio alone.
        self._loop = asyncio.Runner()
        self._client = httpx.AsyncClient(
            timeout=None, headers={"Authorization": f"Bearer {token}"} if token else None
        )

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Return the rewards of all responses, requested batch after batch.

        Raises:
            RewardError: no answer after all attempts, or not one finite number per response.
        """
        rewards: list[float] = []
        for start in range(0, len(responses), self._batch):
            rewards += self._rewards(responses[start : start + self._batch])
        return rewards

    def close(self) -> None:
        """Close connections."""
        with self._loop:
            self._loop.run(self._client.aclose())

    def _rewards(self, responses: Sequence[Response]) -> list[float]:
        body = self._body(responses)
        for attempt in range(1 + self._retries):
            try:
                return validate_rewards(
                    self._read(self._attempt(body, responses), responses), responses, self.label
                )
            except Unanswered as error:
                warning = f"{self.label}: attempt {attempt + 1} of {1 + self._retries}: {error}"
                if attempt == self._retries:
                    raise self._given_up(error, responses) from error
                self._log.warning(warning)
                pause = FIRST_PAUSE_S * 2**attempt if error.pause_s is None else error.pause_s
                time.sleep(min(pause, LONGEST_PAUSE_S))
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

    def _attempt(self, body: bytes, responses: Sequence[Response]) -> bytes:
        import httpx

        try:
            return self._loop.run(self._post(body, responses))
        except TimeoutError as error:
            raise Unanswered(f"no whole answer within {self._timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from error

    async def _post(self, body: bytes, responses: Sequence[Response]) -> bytes:
        """Return the content of the answer. Raises TimeoutError after `timeout_s`."""
        kind = {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream("POST", self._url, content=body, headers=kind) as http_response,
        ):
            content = bytearray()
            async for piece in http_response.aiter_bytes():
                content += piece
                if len(content) > LONGEST_ANSWER:
                    raise RewardError(f"{self.label} answers with more than {LONGEST_ANSWER} bytes")
            self._require_success(http_response, bytes(content), responses)
            return bytes(content)

    def _require_success(
        self, http_response: httpx.Response, content: bytes, responses: Sequence[Response]
    ) -> None:
        status = http_response.status_code
        if 200 <= status < 300:
            return
        shown = f"status {status} {http_response.reason_phrase}: {_shown(content)}"
        if status == 429 or status >= 500:
            raise Unanswered(shown, _retry_after(http_response.headers.get("Retry-After")))
        moved = http_response.headers.get("Location")
        raise RewardError(
            f"{self.label} refuses the request: {shown}",
            details=[f"batch of {len(responses)}, first:", *error_details(responses[0])],
            hint=f"reward.url={redact_url(moved)}" if moved else "read the server's log",
        )

    def _read(self, content: bytes, responses: Sequence[Response]) -> Any:
        try:
            return json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f'{self.label} does not answer {{"rewards": [...]}} but {_shown(content)}',
                details=[f"batch of {len(responses)}, first:", *error_details(responses[0])],
                hint="the answer has to be JSON with one number per response",
            ) from error

    def _given_up(self, error: Unanswered, responses: Sequence[Response]) -> RewardError:
        attempts = 1 + self._retries
        return RewardError(
            f"{self.label} gave no rewards in {attempts} attempt{'s' * (attempts > 1)}: {error}",
            details=[f"batch of {len(responses)}, first {describe(responses[0])}"],
            hint="is the server up? see reward.timeout_s, reward.retries and reward.batch",
        )


def _retry_after(text: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None for a date, which servers hardly use."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds)


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
