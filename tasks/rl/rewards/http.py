"""`reward.url`: an HTTP endpoint that is asked in batches.

It gets a POST of JSON, each field a list with an element a reply:

    query         prompt and reply as one text, as the policy saw it, special tokens included
    prompts       the prompt in the same way
    completions   the reply's text alone
    labels        the row's `answer`; null where it has none
    rows          the rows of the data

and answers `{"rewards": [a number for each]}`. Servers written for OpenRLHF's `remote_rm_url`,
which read `query`, `prompts` and `labels`, serve as they are. A token in the environment variable
`PLUMBLINE_REWARD_TOKEN` is sent as `Authorization: Bearer`.

Asked again are a connection that fails, an answer that does not come in time, and the statuses 429
and 5xx, since another attempt may find them gone. Anything else is an error at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from tasks.core.errors import RewardError
from tasks.process.output import Log
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards.sources import about, checked, named

if TYPE_CHECKING:
    import httpx

TOKEN = "PLUMBLINE_REWARD_TOKEN"
FIRST_PAUSE_S = 0.5
"""Before the first further attempt; each later one waits twice as long."""
LONGEST_PAUSE_S = 30.0
LONGEST_ANSWER = 64 << 20
SHOWN = 300


class Unanswered(Exception):
    """One attempt failed; the text says how. Another one may do better.

    Attributes:
        pause_s: what the server asks to wait; None where it does not.
    """

    def __init__(self, what: str, pause_s: float | None = None) -> None:
        super().__init__(what)
        self.pause_s = pause_s


class Endpoint:
    """An HTTP server that gives rewards.

    Args:
        url: http or https.
        tokenizer: the policy's, to show texts as it sees them.
        timeout_s: of one attempt, from connecting to the last byte.
        retries: further attempts for one batch.
        batch: replies a request.
        log: gets attempts that failed.
    """

    def __init__(
        self, url: str, *, tokenizer: Any, timeout_s: float, retries: int, batch: int, log: Log
    ) -> None:
        import httpx

        self.who = f"reward.url={redacted(url)}"
        self._url, self._tokenizer, self._log = url, tokenizer, log
        self._timeout_s, self._retries, self._batch = timeout_s, retries, batch
        token = os.environ.get(TOKEN)
        self._client = httpx.Client(
            timeout=timeout_s, headers={"Authorization": f"Bearer {token}"} if token else None
        )

    def __call__(self, replies: Sequence[Reply]) -> list[float]:
        """Ask for all replies, batch after batch.

        Raises:
            RewardError: no answer after all attempts, or one that is not a finite number a reply.
        """
        found: list[float] = []
        for start in range(0, len(replies), self._batch):
            found += self._rewards(replies[start : start + self._batch])
        return found

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _rewards(self, replies: Sequence[Reply]) -> list[float]:
        body = self._body(replies)
        for attempt in range(1 + self._retries):
            try:
                return checked(self._read(self._attempt(body, replies), replies), replies, self.who)
            except Unanswered as error:
                said = f"{self.who}: attempt {attempt + 1} of {1 + self._retries}: {error}"
                if attempt == self._retries:
                    raise self._given_up(error, replies) from error
                self._log.warning(said)
                pause = FIRST_PAUSE_S * 2**attempt if error.pause_s is None else error.pause_s
                time.sleep(min(pause, LONGEST_PAUSE_S))
        raise AssertionError("an attempt returns or raises")

    def _body(self, replies: Sequence[Reply]) -> bytes:
        decode = self._tokenizer.decode
        rows = [dict(reply.prompt.row) for reply in replies]
        body = {
            "query": [
                decode([*one.prompt.ids.tolist(), *one.generated.ids.tolist()]) for one in replies
            ],
            "prompts": [decode(one.prompt.ids.tolist()) for one in replies],
            "completions": [one.text for one in replies],
            "labels": [row.get("answer") for row in rows],
            "rows": rows,
        }
        return json.dumps(body).encode()

    def _attempt(self, body: bytes, replies: Sequence[Reply]) -> bytes:
        import httpx

        until = time.monotonic() + self._timeout_s
        try:
            with self._client.stream(
                "POST", self._url, content=body, headers={"Content-Type": "application/json"}
            ) as response:
                content = self._content(response, until)
                self._require_success(response, content, replies)
                return content
        except httpx.TimeoutException as error:
            raise Unanswered(f"no answer within {self._timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from error

    def _content(self, response: httpx.Response, until: float) -> bytes:
        """The whole answer; httpx bounds the wait for each piece, not for all of them."""
        pieces, size = [], 0
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if time.monotonic() > until:
                raise Unanswered(f"no whole answer within {self._timeout_s:g} s")
            if size > LONGEST_ANSWER:
                raise RewardError(f"{self.who} answers with more than {LONGEST_ANSWER} bytes")
        return b"".join(pieces)

    def _require_success(
        self, response: httpx.Response, content: bytes, replies: Sequence[Reply]
    ) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        shown = f"status {status} {response.reason_phrase}: {_shown(content)}"
        if status == 429 or status >= 500:
            raise Unanswered(shown, _asked_pause(response.headers.get("Retry-After")))
        moved = response.headers.get("Location")
        raise RewardError(
            f"{self.who} refuses the request: {shown}",
            details=[f"batch of {len(replies)}, first:", *about(replies[0])],
            hint=f"reward.url={redacted(moved)}" if moved else "look into the server's log",
        )

    def _read(self, content: bytes, replies: Sequence[Reply]) -> Any:
        try:
            return json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f'{self.who} does not answer {{"rewards": [...]}} but {_shown(content)}',
                details=[f"batch of {len(replies)}, first:", *about(replies[0])],
                hint="the answer has to be JSON with a number for each reply",
            ) from error

    def _given_up(self, error: Unanswered, replies: Sequence[Reply]) -> RewardError:
        attempts = 1 + self._retries
        return RewardError(
            f"{self.who} gave no rewards in {attempts} attempt{'s' * (attempts > 1)}: {error}",
            details=[f"batch of {len(replies)}, first {named(replies[0])}"],
            hint="is the server up? reward.timeout_s, reward.retries and reward.batch can be set",
        )


def redacted(url: str) -> str:
    """A URL without what may be secret in it: user, password, query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if "@" in parts.netloc else host
    return urlunsplit((parts.scheme, netloc, parts.path, "***" if parts.query else "", ""))


def _asked_pause(text: str | None) -> float | None:
    """Seconds of a `Retry-After`; None for a date, which hardly any server sends."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds)


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
