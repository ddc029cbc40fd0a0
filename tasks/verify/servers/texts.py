"""Servers that take texts and no token ids: TGI, Ollama, `transformers serve`.

A sequence is sent as the text of its ids. The server splits it again, so that a sequence counts
only if the server says that it saw as many tokens, or the same ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.scoring import EMPTY, score_next
from tasks.verify.servers.server import (
    Abilities,
    Entry,
    Generated,
    Message,
    Prompt,
    Scores,
    Server,
    ServerError,
    Tools,
    UnsupportedError,
)
from tasks.verify.servers.vocabulary import Vocabulary


class TextServer(Server):
    """A server of texts.

    Args:
        http: its client.
        kind: dialect.
        version: as the server says.
        vocabulary: texts of token ids; without it nothing can be scored.
    """

    exact = False

    def __init__(self, http: Http, kind: str, version: str, vocabulary: Vocabulary | None) -> None:
        self.http, self.url, self.kind, self.version = http, http.url, kind, version
        self.vocabulary = vocabulary
        self.abilities = Abilities(vocabulary is not None, 0, 0, False, False)

    @abstractmethod
    def next_token(self, model: str, text: str, ids: Sequence[int]) -> Entry | None:
        """Return the most likely next tokens after a text; None if it became other ids there."""

    @abstractmethod
    def respond(
        self, model: str, prompt: str | Sequence[Message], count: int, sampling: Mapping[str, Any]
    ) -> Generated:
        """Return one response to a text or a conversation."""

    def score(
        self, model: str, sequences: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Scores]:
        """Return the log-probabilities of a sample of positions of each sequence."""
        return score_next(partial(self.next_tokens, model, workers=workers), sequences)

    def next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated."""
        if not self.abilities.next_logprobs:
            raise UnsupportedError(f"{self.url} returns no log-probabilities")

        def ask(prefix: Sequence[int]) -> Entry:
            # A server that puts BOS before every text gets the rest of a sequence with BOS.
            begins = self.vocabulary is not None and prefix[0] == self.vocabulary.bos
            for sent in (prefix, prefix[1:] if begins else ()):
                text = self.text(sent)
                if text:
                    tops = self.next_token(model, text, prefix)
                    if tops is not None:
                        return tops
            return EMPTY

        return self.http.parallel(ask, list(prefixes), workers)

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        raise UnsupportedError(f"{self.url} does not tokenise texts")

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""
        raise UnsupportedError(f"{self.url} does not tell the token ids of a conversation")

    def generate(
        self,
        model: str,
        prompt: Prompt,
        count: int,
        n: int = 1,
        *,
        stream: bool = False,
        **sampling: Any,
    ) -> list[Generated]:
        """Return n responses of at most `count` tokens. Streams are not read."""
        if stream:
            raise UnsupportedError(f"{self.url}: streams of {self.kind} are not read")
        if "logit_bias" in sampling:
            raise UnsupportedError(f"{self.url} takes no logit_bias")
        ids = [token for token in prompt if not isinstance(token, Mapping)]
        messages = [message for message in prompt if isinstance(message, Mapping)]
        sent: str | Sequence[Message] | None = messages or self.text(ids)
        if not sent:
            raise UnsupportedError(f"{self.url} takes texts only, and these tokens are none")
        return self.http.parallel(
            lambda _: self.respond(model, sent, count, sampling), list(range(n))
        )

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of token ids; None if they end within a letter."""
        if self.vocabulary is None:
            raise UnsupportedError(
                f"{self.url} takes texts only, and the source has no tokenizer.json",
                hint="source= a folder with the tokenizer of the training",
            )
        return self.vocabulary.text(ids)

    def named(self, error: ServerError, model: str) -> ServerError:
        """Return the error of an unknown model's name with the names that exist."""
        names = [served.name for served in self.models()]
        if error.code not in ("missing", "request") or model in names or not names:
            return error
        return ServerError(
            f"{self.url} serves no model {model!r}",
            details=[f"it serves {', '.join(names)}"],
            hint=f"name={names[0]}",
            code="model",
        )
