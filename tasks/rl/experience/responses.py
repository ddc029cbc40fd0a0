"""What the pieces of the loop hand to each other: prompts, replies, and what they were worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One prompt of the dataset, tokenised once and never again.

    Attributes:
        row: its row in the dataset artifact: `id`, `messages`, `answer` where there is one, and
            whatever else the user's data carries.
        ids: (P,) token ids, the chat template's generation prompt included.
    """

    row: Mapping[str, Any]
    ids: NDArray[np.int32]

    @property
    def messages(self) -> list[dict[str, str]]:
        """What is asked: the row's conversation without a reference answer at its end."""
        messages = list(self.row["messages"])
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


@dataclass(frozen=True)
class Request:
    """A prompt to be answered `samples` times.

    Attributes:
        ids: (P,) its token ids.
        samples: how many replies.
        seed: of the sampling; the same prompt, weights and seed give the same replies.
    """

    ids: NDArray[np.int32]
    samples: int
    seed: int


@dataclass(frozen=True)
class Generated:
    """One reply as the engine gave it: token ids and nothing else is passed on.

    Attributes:
        ids: (n,) token ids, n >= 1; the end token included where the reply ended by itself.
        logprobs: (n,) float32, natural logarithm, under the distribution that was sampled from
            (temperature applied, before top-p and top-k cut it off).
        ended: whether it ended by itself; False: cut off at the limit.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ended: bool


@dataclass(frozen=True)
class Reply:
    """A reply with everything a reward may want to know.

    Attributes:
        prompt: what was asked.
        generated: what was answered.
        text: the answer decoded, without special tokens.
    """

    prompt: Prompt
    generated: Generated
    text: str


@dataclass(frozen=True)
class Scored:
    """A reply, and what it was worth.

    Attributes:
        reply: the reply.
        group: number of its prompt within the iteration.
        reward: the weighted sum of all parts.
        parts: by name of the source, before weights.
    """

    reply: Reply
    group: int
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
