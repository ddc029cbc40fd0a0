"""Token ids between two responses of an episode, as a server renders them in a chat.

After a response, the chat template writes the rest of the assistant's turn, the observation as the
next message, and the generation prompt. These tokens are appended once; what was sampled stays as
it was sampled and is never tokenised again. This equals the context of a served model only if the
template does not rewrite earlier messages when a conversation goes on, so other templates are
refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.core.errors import ConfigError
from tasks.rl.prompts import render
from tasks.rl.responses import Prompt

Messages = Sequence[dict[str, str]]
REPLIES = ("ok-reply", "<think>\nhm\n</think>\n\nok-reply")
"""Responses of the probes: some templates drop reasoning once the conversation goes on."""
FIRST, SECOND = "first-observation", "second-observation"


def probes(prompt: Messages, role: str) -> list[list[dict[str, str]]]:
    """Return conversations whose texts tell whether a chat template can be used.

    The prompt ends with the user's message; the role is that of observations.
    """
    conversations = [list(prompt)]
    for reply in REPLIES:
        response = {"role": "assistant", "content": reply}
        once = [*prompt, response, {"role": role, "content": FIRST}]
        conversations += [once, [*once, response, {"role": role, "content": SECOND}]]
    return conversations


def unstable(texts: Sequence[str]) -> str:
    """Return why a chat template cannot be used for several turns; empty if it can.

    The texts are those of `probes`, each with the generation prompt.
    """
    begin, *others = texts
    for reply, once, twice in zip(REPLIES, others[::2], others[1::2], strict=True):
        rest = once.removeprefix(begin)
        blank = rest[: len(rest) - len(rest.lstrip())]
        between = rest[len(blank) + len(reply) :]
        response_stays = once.startswith(begin + blank + reply)
        if not response_stays or twice != once + blank + reply + between.replace(FIRST, SECOND):
            return f"it rewrites earlier messages when the conversation goes on, as after {reply!r}"
    return ""


def refused(reason: str, role: str) -> ConfigError:
    """Return the error about a chat template that cannot be used."""
    other = "tool" if role == "user" else "user"
    return ConfigError(
        f"rl.environment: the chat template cannot be used for several turns: {reason}",
        hint=f"rl.observation_role={other}, or data.chat_template=<Jinja file> that renders "
        "earlier messages always the same",
    )


@dataclass(frozen=True)
class ObservationTokens:
    """Renders observations."""

    tokenizer: Any  # has a chat template
    ends: Collection[int]  # ids that end a response
    role: str = "user"  # role of observations, `rl.observation_role`

    def require_stable(self, prompt: Prompt) -> None:
        """Raise a ConfigError if the chat template cannot be used; needs one prompt to try it."""
        try:
            conversations = probes(prompt.messages, self.role)
            rows = ({**prompt.row, "messages": messages} for messages in conversations)
            reason = unstable([render(row, self.tokenizer) for row in rows])
            self.of(prompt, FIRST)
        except TemplateError as error:
            reason = f"it rejects a message of role {self.role!r}: {error}"
        if reason:
            raise refused(reason, self.role)

    def of(self, prompt: Prompt, observation: str) -> NDArray[np.int32]:
        """Return the (o,) int32 token ids between a response's end token and the next response."""
        messages = [
            *prompt.messages,
            {"role": "assistant", "content": REPLIES[0]},
            {"role": self.role, "content": observation},
        ]
        text = render({**prompt.row, "messages": messages}, self.tokenizer)
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        start = len(prompt.ids)
        ends = np.flatnonzero(np.isin(ids[start:], list(self.ends)))
        if not np.array_equal(ids[:start], prompt.ids) or not len(ends):
            reason = f"it changes the prompt, or ends no response with {sorted(self.ends)}"
            raise refused(reason, self.role)
        return ids[start + int(ends[0]) + 1 :]
