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

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.data.messages import REASONING, Message
from tasks.training.tokens.examples import Tokens, all_but_first

UNSTABLE = "the chat template is not prefix-stable: "
LAST = (
    f"{UNSTABLE}the conversation does not begin with the rendered prompt, so the answer's first "
    "token is unknown"
)
EARLIER = (
    f"{UNSTABLE}it renders message {{}} differently when the conversation goes on, so earlier "
    "answers cannot be trained (train.mask=last_answer does not need it)"
)


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
    """A trained answer: the text before it, the text up to its end, and why tokens may differ."""

    before: str
    until: str
    unstable: str


class Rendered(NamedTuple):
    """The text of a conversation and its trained answers."""

    text: str
    answers: list[Answer]


def encode_conversations(
    tokenizer: Any, ends: Collection[int], conversations: Sequence[Turns]
) -> list[Tokens | Unfit]:
    """Return token ids and loss marks of each conversation, or the reason why it is unfit.

    `ends` are the token ids that may end a turn. All texts are tokenised in one call, and repeated
    ones (such as the prompt of a pair) once.
    """
    rendered = [_render(tokenizer, turns) for turns in conversations]
    texts: dict[str, None] = {}
    for result in rendered:
        if isinstance(result, Rendered):
            texts[result.text] = None
            texts |= dict.fromkeys(text for a in result.answers for text in (a.before, a.until))
    ids: dict[str, list[int]] = {}
    if texts:
        tokenised = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        ids = dict(zip(texts, tokenised, strict=True))
    return [
        result if isinstance(result, Unfit) else _mark(result, ids, ends, turns.everything)
        for turns, result in zip(conversations, rendered, strict=True)
    ]


def _render(tokenizer: Any, turns: Turns) -> Rendered | Unfit:
    messages = turns.messages
    if not messages or messages[-1]["role"] != "assistant":
        return Unfit("the last message is not the assistant's")

    def render(messages: Sequence[Message], tools: Any = turns.tools, prompt: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    try:
        text = render(messages)
        for part, others, tools in _without_parts(turns):
            with contextlib.suppress(TemplateError):  # it asks for what was taken away
                if render(others, tools) == text:
                    return Unfit(f"the chat template leaves out {part}")
        answers = []
        for number in range(turns.first, len(messages)):
            if turns.everything or messages[number]["role"] != "assistant":
                continue
            # transformers cannot render an empty conversation
            before = render(messages[:number], prompt=True) if number else ""
            last = number == len(messages) - 1
            until = text if last else render(messages[: number + 1])
            answer = Answer(before, until, LAST if last else EARLIER.format(number + 1))
            if not text.startswith(before) or not text.startswith(until):
                return Unfit(answer.unstable)
            if not before:
                return Unfit("no token before the answer from which to predict its first token")
            answers.append(answer)
    except TemplateError as error:  # `raise_exception` of a template
        return Unfit(f"the chat template refuses the conversation: {error}")
    return Rendered(text, answers)


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


def _mark(
    rendered: Rendered, tokenised: Mapping[str, list[int]], ends: Collection[int], everything: bool
) -> Tokens | Unfit:
    """Mark the tokens of each answer up to the last end of a turn; cut what comes after it."""
    ids = tokenised[rendered.text]
    # The first token has none before it to predict it from.
    spans = [(1, len(ids))] if everything else []
    for answer in rendered.answers:
        before, until = tokenised[answer.before], tokenised[answer.until]
        if ids[: len(before)] != before or ids[: len(until)] != until:
            return Unfit(answer.unstable)
        spans.append((len(before), len(until)))
    bears: NDArray[np.uint8] = np.zeros(len(ids), np.uint8)
    end = 0
    for begin, end in spans:
        while end > begin and ids[end - 1] not in ends:
            end -= 1
        if end == begin:
            return Unfit(
                f"the chat template does not end the turn: none of the ids {sorted(ends)} after "
                "the answer"
            )
        if end == begin + 1:
            return Unfit("no trainable token: the chat template leaves nothing of the answer")
        bears[begin:end] = 1
    return Tokens(np.asarray(ids[:end], np.int32), bears[:end])


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Tokens | Unfit]:
    """Return token ids and loss marks of raw texts, or the reason why one is unfit.

    A text begins as the tokenizer begins texts (with a BOS token if it has one) and ends with its
    EOS token. Every token bears loss but the first, since no token before it predicts it.
    """
    end, encoded = int(tokenizer.eos_token_id), list[Tokens | Unfit]()
    for ids in tokenizer(list(texts), verbose=False)["input_ids"] if texts else ():
        whole = ids if ids and ids[-1] == end else [*ids, end]
        if len(whole) > 1:
            encoded.append(all_but_first(np.asarray(whole, np.int32)))
        else:
            encoded.append(Unfit("no trainable token: the tokenizer makes nothing of the text"))
    return encoded
