"""Conversations and raw texts to token ids, with marks on the tokens that bear loss.

Of a conversation only answers and the tokens that end them bear loss. An answer begins where the
chat template ends when it renders the messages before it with a generation prompt, as a server
does. This prompt has to be a prefix of the whole conversation, both as text and as token ids. For
an earlier answer the same holds for its end. So templates that drop or rewrite earlier turns (such
as reasoning) are refused: a server would never show the model such a text. So are templates that
leave out what a conversation has: its tools, their calls and results, the reasoning of an answer
that is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.data.messages import REASONING
from tasks.training.tokens.examples import Tokens

Message = dict[str, Any]


class Unfit(ValueError):
    """A sample that cannot be used; its message gives the reason."""


class Turns(NamedTuple):
    """A conversation; answers from message `first` on bear loss.

    With `everything` all tokens bear loss, as in pre-training.
    """

    messages: Sequence[Message]
    first: int
    everything: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None


class Answer(NamedTuple):
    """A trained answer: the text before it, the text up to its end, and its message's number."""

    begin: str
    end: str
    number: int
    last: bool


class Rendered(NamedTuple):
    """A conversation as text, and its trained answers."""

    text: str
    answers: tuple[Answer, ...]
    everything: bool

    def texts(self) -> list[str]:
        """Return all texts that have to be tokenised."""
        return [self.text, *(text for a in self.answers for text in (a.begin, a.end))]


@dataclass(frozen=True)
class Encoder:
    """Renders and tokenises conversations.

    Attributes:
        tokenizer: a Hugging Face tokenizer with a chat template.
        ends: token ids that may end a turn.
    """

    tokenizer: Any
    ends: frozenset[int]

    def encode(self, conversations: Sequence[Turns]) -> list[Tokens | Unfit]:
        """Return token ids and loss marks of each conversation, or the reason it is unfit.

        All texts are tokenised in one call, and repeated ones (such as the prompt of a pair) once.
        """
        results = [self._attempted(turns) for turns in conversations]
        texts = dict.fromkeys(
            text for result in results if isinstance(result, Rendered) for text in result.texts()
        )
        tokenised = (
            self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        )
        ids = dict(zip(texts, tokenised, strict=True))
        return [
            self._marked(result, [ids[text] for text in result.texts()])
            if isinstance(result, Rendered)
            else result
            for result in results
        ]

    def _attempted(self, turns: Turns) -> Rendered | Unfit:
        try:
            return self._rendered(turns)
        except TemplateError as error:  # `raise_exception` of a template
            return Unfit(f"the chat template refuses the conversation: {error}")

    def _rendered(self, turns: Turns) -> Rendered | Unfit:
        messages = turns.messages
        if not messages or messages[-1]["role"] != "assistant":
            return Unfit("the last message is not the assistant's")
        text = self._render(messages, turns.tools)
        if missing := self._left_out(turns, text):
            return Unfit(f"the chat template leaves out {missing}")
        if turns.everything:
            return Rendered(text, (), everything=True)
        answers = []
        for number in range(turns.first, len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            before = messages[:number]  # transformers cannot render an empty conversation
            begin = self._render(before, turns.tools, prompt=True) if before else ""
            last = number == len(messages) - 1
            end = text if last else self._render(messages[: number + 1], turns.tools)
            if not text.startswith(begin) or not text.startswith(end):
                return Unfit(_unstable(number, last=last))
            if not begin:
                return Unfit("no token before the answer from which to predict its first token")
            answers.append(Answer(begin, end, number, last))
        return Rendered(text, tuple(answers), everything=False)

    def _left_out(self, turns: Turns, text: str) -> str:
        """Return what the template does not render; "" if nothing is missing."""
        for what, messages, tools in _without_parts(turns):
            try:
                if self._render(messages, tools) == text:
                    return what
            except TemplateError:  # it asks for what was taken away
                continue
        return ""

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt: bool = False,
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _marked(self, rendered: Rendered, tokenised: Sequence[list[int]]) -> Tokens | Unfit:
        ids, *prefixes = tokenised
        bears: NDArray[np.uint8] = np.zeros(len(ids), np.uint8)
        stop = 0
        for answer, begin, end in zip(rendered.answers, prefixes[::2], prefixes[1::2], strict=True):
            if ids[: len(begin)] != begin or ids[: len(end)] != end:
                return Unfit(_unstable(answer.number, last=answer.last))
            stop = self._after_end(ids, len(begin), len(end))
            if not stop:
                return Unfit(self._no_end())
            if stop == len(begin) + 1:
                return Unfit("no trainable token: the chat template leaves nothing of the answer")
            bears[len(begin) : stop] = 1
        if rendered.everything:
            stop = self._after_end(ids, 0, len(ids))
            if stop < 2:
                return Unfit(self._no_end())
            bears[1:stop] = 1  # the first token has none before it to predict it from
        return Tokens(np.asarray(ids[:stop], np.int32), bears[:stop])

    def _after_end(self, ids: Sequence[int], begin: int, end: int) -> int:
        """Return the position after the last end of a turn within [begin, end), or 0."""
        return next((i + 1 for i in range(end - 1, begin - 1, -1) if ids[i] in self.ends), 0)

    def _no_end(self) -> str:
        return (
            "the chat template does not end the turn: none of the ids "
            f"{sorted(self.ends)} after the answer"
        )


def _without_parts(turns: Turns) -> Iterator[tuple[str, Sequence[Message], Any]]:
    """Yield a conversation without its tools, a call, a result, or reasoning that is trained."""
    if turns.tools:
        yield "the row's tools", turns.messages, None
    for number, message in enumerate(turns.messages):
        keys = ("tool_calls", *(REASONING if number >= turns.first else ()))
        changed = {
            f"{key!r} of message {number + 1}": {k: v for k, v in message.items() if k != key}
            for key in keys if key in message
        }  # fmt: skip
        if message["role"] == "tool" and message["content"]:
            changed[f"message {number + 1}, by a tool"] = {**message, "content": ""}
        for what, other in changed.items():
            before, after = turns.messages[:number], turns.messages[number + 1 :]
            yield what, [*before, other, *after], turns.tools


def _unstable(number: int, *, last: bool) -> str:
    if last:
        return (
            "the chat template is not prefix-stable: the conversation does not begin with the "
            "rendered prompt, so the answer's first token is unknown"
        )
    return (
        f"the chat template is not prefix-stable: it renders message {number + 1} differently when "
        "the conversation goes on, so earlier answers cannot be trained "
        "(train.mask=last_answer does not need it)"
    )


class Document(NamedTuple):
    """A raw text."""

    text: str


@dataclass(frozen=True)
class TextEncoder:
    """Tokenises raw texts, as in pre-training: every token bears loss, EOS included.

    A text begins as the tokenizer begins texts (with a BOS token if it has one) and ends with its
    EOS token. The first token bears no loss, since no token before it predicts it.

    Attributes:
        tokenizer: a Hugging Face tokenizer with an EOS token.
    """

    tokenizer: Any

    def encode(self, documents: Sequence[Document]) -> list[Tokens | Unfit]:
        """Return token ids and loss marks of each text, or the reason it is unfit."""
        if not documents:
            return []
        texts = [document.text for document in documents]
        tokenised = self.tokenizer(texts, verbose=False)["input_ids"]  # no warnings about length
        return [self._marked(ids) for ids in tokenised]

    def _marked(self, ids: list[int]) -> Tokens | Unfit:
        end = int(self.tokenizer.eos_token_id)
        whole = ids if ids and ids[-1] == end else [*ids, end]
        if len(whole) < 2:
            return Unfit("no trainable token: the tokenizer makes nothing of the text")
        bears: NDArray[np.uint8] = np.ones(len(whole), np.uint8)
        bears[0] = 0
        return Tokens(np.asarray(whole, np.int32), bears)


def pieces(tokens: Tokens, max_len: int) -> Iterator[Tokens]:
    """Cut a text into pieces of at most `max_len` tokens, in order.

    Pieces overlap by one token: the last one of a piece is the first of the next, where it bears no
    loss. So every token of a text but its first bears loss exactly once.
    """
    for start in range(0, len(tokens.ids) - 1, max_len - 1):
        ids = tokens.ids[start : start + max_len]
        bears: NDArray[np.uint8] = np.ones(len(ids), np.uint8)
        bears[0] = 0
        yield Tokens(ids, bears)
