"""Conversations to token ids, with the answers' tokens marked.

Loss falls on answers and the tokens that end them, on nothing else. Where an answer begins is
where the template, asked for a generation prompt, stops: that is what a server will feed the
model. It is only trusted when it holds twice over: the rendered prompt is a prefix of the rendered
conversation, and so are its token ids. For an earlier answer the same has to hold for the place
where it ends, so that templates that drop or rewrite earlier turns (reasoning that is taken out)
are refused instead of being trained on what no server will ever show the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.training.tokens.examples import Tokens

Message = dict[str, str]


class Unfit(ValueError):
    """A sample that cannot be used; the text says why."""


class Turns(NamedTuple):
    """A conversation, and where in it loss may fall: on answers from message `first` on.

    `everything` puts it on every token instead, as in pre-training.
    """

    messages: Sequence[Message]
    first: int
    everything: bool = False


class Answer(NamedTuple):
    """One trained answer: the texts up to its begin and up to its end, and its message's number."""

    begin: str
    end: str
    number: int
    last: bool


class Rendered(NamedTuple):
    """A conversation as text, and the answers in it that are trained on."""

    text: str
    answers: tuple[Answer, ...]
    everything: bool

    def texts(self) -> list[str]:
        """All that has to be tokenised."""
        return [self.text, *(text for a in self.answers for text in (a.begin, a.end))]


@dataclass(frozen=True)
class Encoder:
    """Renders and tokenises.

    Attributes:
        tokenizer: a Hugging Face tokenizer with a chat template.
        ends: token ids that may end a turn.
    """

    tokenizer: Any
    ends: frozenset[int]

    def encode(self, conversations: Sequence[Turns]) -> list[Tokens | Unfit]:
        """Token ids and marks of each conversation, whole, or what is wrong with it.

        Tokenised together, and a text that occurs several times (the prompt of a pair, an answer's
        end that is the conversation's) once.
        """
        rendered = [self._attempted(turns) for turns in conversations]
        texts = dict.fromkeys(
            text for one in rendered if isinstance(one, Rendered) for text in one.texts()
        )
        several = (
            self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        )
        ids = dict(zip(texts, several, strict=True))
        return [
            self._marked(one, [ids[text] for text in one.texts()])
            if isinstance(one, Rendered)
            else one
            for one in rendered
        ]

    def _attempted(self, turns: Turns) -> Rendered | Unfit:
        try:
            return self._rendered(turns)
        except TemplateError as error:  # templates refuse with `raise_exception`
            return Unfit(f"the chat template refuses the conversation: {error}")

    def _rendered(self, turns: Turns) -> Rendered | Unfit:
        messages = turns.messages
        if not messages or messages[-1]["role"] != "assistant":
            return Unfit("the last message is not the assistant's")
        text = self._render(messages)
        if turns.everything:
            return Rendered(text, (), everything=True)
        answers = []
        for number in range(turns.first, len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            before = messages[:number]  # transformers renders nothing of nothing
            begin = self._render(before, add_generation_prompt=True) if before else ""
            last = number == len(messages) - 1
            end = text if last else self._render(messages[: number + 1])
            if not text.startswith(begin) or not text.startswith(end):
                return Unfit(_unstable(number, last=last))
            if not begin:
                return Unfit("nothing stands before the answer that could foretell its first token")
            answers.append(Answer(begin, end, number, last))
        return Rendered(text, tuple(answers), everything=False)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _marked(self, one: Rendered, tokenised: Sequence[list[int]]) -> Tokens | Unfit:
        ids, *prefixes = tokenised
        bears: NDArray[np.uint8] = np.zeros(len(ids), np.uint8)
        stop = 0
        for answer, begin, end in zip(one.answers, prefixes[::2], prefixes[1::2], strict=True):
            if ids[: len(begin)] != begin or ids[: len(end)] != end:
                return Unfit(_unstable(answer.number, last=answer.last))
            stop = self._after_end(ids, len(begin), len(end))
            if not stop:
                return Unfit(self._no_end())
            if stop == len(begin) + 1:
                return Unfit("no trainable token: the chat template leaves nothing of the answer")
            bears[len(begin) : stop] = 1
        if one.everything:
            stop = self._after_end(ids, 0, len(ids))
            if stop < 2:
                return Unfit(self._no_end())
            bears[1:stop] = 1  # nothing stands before the first token that could foretell it
        return Tokens(np.asarray(ids[:stop], np.int32), bears[:stop])

    def _after_end(self, ids: Sequence[int], begin: int, end: int) -> int:
        """The place after the last end of a turn within [begin, end); 0 when there is none."""
        return next((i + 1 for i in range(end - 1, begin - 1, -1) if ids[i] in self.ends), 0)

    def _no_end(self) -> str:
        return (
            "the chat template does not end the turn: none of the ids "
            f"{sorted(self.ends)} after the answer"
        )


def _unstable(number: int, *, last: bool) -> str:
    if last:
        return (
            "the chat template is not prefix-stable: the prompt alone is not how the whole "
            "conversation begins, so the answer's first token cannot be told"
        )
    return (
        f"the chat template is not prefix-stable: message {number + 1} reads otherwise once the "
        "conversation goes on, so an earlier answer cannot be trained on as it was given "
        "(train.mask=last_answer does not need it)"
    )
