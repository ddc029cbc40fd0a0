"""Data classes of the training loop: prompts, responses and their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.serving.vllm.colocation import Generated


@dataclass(frozen=True)
class Prompt:
    """One prompt of the dataset with its token ids.

    Attributes:
        row: the row of the dataset artifact: `id`, `messages`, `answer` if there is one, and any
            other column of the user's data.
        ids: (P,) token ids, including the chat template's generation prompt.
    """

    row: Mapping[str, Any]
    ids: NDArray[np.int32]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation without a reference answer at its end."""
        messages = list(self.row["messages"])
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


@dataclass(frozen=True)
class Request:
    """A prompt to sample responses to.

    Attributes:
        ids: (P,) token ids of the prompt.
        samples: number of responses.
        seed: sampling seed. The same prompt, weights and seed give the same responses.
    """

    ids: NDArray[np.int32]
    samples: int
    seed: int


@dataclass(frozen=True)
class Response:
    """A response with everything a reward may need.

    Attributes:
        prompt: the prompt.
        generated: token ids and log-probabilities.
        text: the decoded response, without special tokens.
    """

    prompt: Prompt
    generated: Generated
    text: str


@dataclass(frozen=True)
class ScoredResponse:
    """A response and its reward.

    Attributes:
        response: the response.
        group: number of its prompt within the iteration.
        reward: weighted sum of all parts.
        parts: rewards by source, before weights.
    """

    response: Response
    group: int
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
