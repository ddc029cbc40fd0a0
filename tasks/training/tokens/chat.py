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

    @property
    def unstable(self) -> Unfit:
        """The error if the text before it is not a prefix of the conversation."""
        if self.last:
            return Unfit(
                "the chat template is not prefix-stable: the conversation does not begin with the "
                "rendered prompt, so the answer's first token is unknown"
            )
        return Unfit(
            f"the chat template is not prefix-stable: it renders message {self.number + 1} "
            "differently when the conversation goes on, so earlier answers cannot be trained "
            "(train.mask=last_answer does not need it)"
        )


@dataclass(frozen=True)
class Encoder:
    """Renders and tokenises conversations."""

    tokenizer: Any  # a Hugging Face tokenizer with a chat template
    ends: frozenset[int]  # token ids that may end a turn

    def encode(self, conversations: Sequence[Turns]) -> list[Tokens | Unfit]:
        """Return token ids and loss marks of each conversation, or the reason it is unfit.

        All texts are tokenised in one call, and repeated ones (such as the prompt of a pair) once.
        """
        rendered: list[tuple[str, list[Answer]] | Unfit] = []
        for turns in conversations:
            try:
                rendered.append(self._rendered(turns))
            except Unfit as unfit:
                rendered.append(unfit)
            except TemplateError as error:  # `raise_exception` of a template
                refused = f"the chat template refuses the conversation: {error}"
                rendered.append(Unfit(refused))
        texts: dict[str, None] = {}
        for result in rendered:
            if not isinstance(result, Unfit):
                text, answers = result
                texts |= dict.fromkeys([text, *(t for a in answers for t in (a.begin, a.end))])
        tokenised: list[list[int]] = []
        if texts:
            tokenised = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        ids = dict(zip(texts, tokenised, strict=True))
        encoded: list[Tokens | Unfit] = []
        for turns, result in zip(conversations, rendered, strict=True):
            try:
                encoded.append(
                    result if isinstance(result, Unfit) else self._marked(turns, *result, ids)
                )
            except Unfit as unfit:
                encoded.append(unfit)
        return encoded

    def _rendered(self, turns: Turns) -> tuple[str, list[Answer]]:
        """Return the text of a conversation, and its trained answers."""
        messages = turns.messages
        if not messages or messages[-1]["role"] != "assistant":
            raise Unfit("the last message is not the assistant's")
        text = self._render(messages, turns.tools)
        for part, others, tools in _without_parts(turns):
            try:
                left_out = self._render(others, tools) == text
            except TemplateError:  # it asks for what was taken away
                continue
            if left_out:
                raise Unfit(f"the chat template leaves out {part}")
        answers: list[Answer] = []
        for number in range(turns.first, len(messages)):
            if turns.everything or messages[number]["role"] != "assistant":
                continue
            before = messages[:number]  # transformers cannot render an empty conversation
            begin = self._render(before, turns.tools, prompt=True) if before else ""
            last = number == len(messages) - 1
            end = text if last else self._render(messages[: number + 1], turns.tools)
            answer = Answer(begin, end, number, last)
            if not text.startswith(begin) or not text.startswith(end):
                raise answer.unstable
            if not begin:
                raise Unfit("no token before the answer from which to predict its first token")
            answers.append(answer)
        return text, answers

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

    def _marked(
        self, turns: Turns, text: str, answers: Sequence[Answer], tokenised: dict[str, list[int]]
    ) -> Tokens:
        ids = tokenised[text]
        bears: NDArray[np.uint8] = np.zeros(len(ids), np.uint8)
        stop = 0
        for answer in answers:
            begin, end = tokenised[answer.begin], tokenised[answer.end]
            if ids[: len(begin)] != begin or ids[: len(end)] != end:
                raise answer.unstable
            stop = self._after_end(ids, len(begin), len(end))
            if stop == len(begin) + 1:
                raise Unfit("no trainable token: the chat template leaves nothing of the answer")
            bears[len(begin) : stop] = 1
        if turns.everything:
            stop = self._after_end(ids, 1, len(ids))
            bears[1:stop] = 1  # the first token has none before it to predict it from
        return Tokens(np.asarray(ids[:stop], np.int32), bears[:stop])

    def _after_end(self, ids: Sequence[int], begin: int, end: int) -> int:
        """Return the position after the last end of a turn within [begin, end)."""
        for place in range(end - 1, begin - 1, -1):
            if ids[place] in self.ends:
                return place + 1
        raise Unfit(
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
        for part, other in changed.items():
            before, after = turns.messages[:number], turns.messages[number + 1 :]
            yield part, [*before, other, *after], turns.tools


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Tokens | Unfit]:
    """Return token ids and loss marks of raw texts, or the reason why one is unfit.

    A text begins as the tokenizer begins texts (with a BOS token if it has one) and ends with its
    EOS token. Every token bears loss but the first, since no token before it predicts it.
    """
    end, encoded = int(tokenizer.eos_token_id), list[Tokens | Unfit]()
    for ids in tokenizer(list(texts), verbose=False)["input_ids"] if texts else ():
        whole = ids if ids and ids[-1] == end else [*ids, end]
        if len(whole) > 1:
            encoded.append(_all_but_first(np.asarray(whole, np.int32)))
        else:
            encoded.append(Unfit("no trainable token: the tokenizer makes nothing of the text"))
    return encoded


def pieces(tokens: Tokens, max_len: int) -> Iterator[Tokens]:
    """Cut a text into pieces of at most `max_len` tokens, in order.

    Pieces overlap by one token: the last one of a piece is the first of the next, where it bears no
    loss. So every token of a text but its first bears loss exactly once.
    """
    for start in range(0, len(tokens.ids) - 1, max_len - 1):
        yield _all_but_first(tokens.ids[start : start + max_len])


def _all_but_first(ids: Any) -> Tokens:
    bears: NDArray[np.uint8] = np.ones(len(ids), np.uint8)
    bears[0] = 0
    return Tokens(ids, bears)
