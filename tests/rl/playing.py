"""Play episodes with a scripted policy and a real environment in its process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.rl.environment import EnvironmentProcess, Episodes, ObservationTokens
from tasks.rl.metrics import Clock
from tasks.rl.responses import Prompt, Request, Response, ScoredResponse
from tasks.serving.vllm.colocation import Generated
from tests.rl.making import TOKENIZER
from tests.rl.peers import alone

LOG = logging.getLogger("tests.rl")
END = TOKENIZER.eos_token_id
GAME = """
class Game:
    def reset(self, id, prompt, seed):
        self.turns, self.end = 0, int(id[1:]) % 3 + 1

    async def step(self, text):
        self.turns += 1
        if self.turns == self.end:
            return None, 1.0, True
        return f"turn {self.turns}: {text}", 0.25, False
"""
"""The episode of prompt n has n % 3 + 1 turns."""
Open = Callable[..., EnvironmentProcess]


def prompt_of(text: str, tokenizer: Any = TOKENIZER, **columns: Any) -> Prompt:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Prompt({"id": text, "messages": messages, **columns}, np.array(ids, np.int32))


PROMPTS = [prompt_of(f"p{n}") for n in range(6)]


@dataclass
class Player:
    """An engine that writes what `policy` says, by the seed of a request; counts its calls."""

    policy: Callable[[Request, int], str] = lambda request, number: f"{request.seed % 97}-{number}"
    tokenizer: Any = TOKENIZER
    limit: int = 200
    seen: list[list[Request]] = field(default_factory=list)

    def generate(
        self, requests: Sequence[Request], *, greedy: bool = False
    ) -> list[list[Generated]]:
        self.seen.append(list(requests))
        return [[self._response(r, n) for n in range(r.samples)] for r in requests]

    def _response(self, request: Request, number: int) -> Generated:
        text = self.policy(request, number)
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"],
               self.tokenizer.eos_token_id]  # fmt: skip
        kept = np.array(ids[: request.limit or self.limit], np.int32)
        logprobs = -np.arange(1, len(kept) + 1, dtype=np.float32)
        return Generated(kept, logprobs, len(kept) == len(ids))


def episodes(
    engine: Player, environment: EnvironmentProcess, *, ranks: Any = None, turns: int = 8,
    budget: int = 200, role: str = "user", tokenizer: Any = TOKENIZER,
) -> Episodes:  # fmt: skip
    observations = ObservationTokens(tokenizer, [tokenizer.eos_token_id], role)
    return Episodes(engine, environment, observations, ranks or alone(), turns, budget)  # type: ignore[arg-type]


def play(prompts: Sequence[Prompt], *arguments: Any, **keywords: Any) -> list[Response]:
    requests = [Request(prompt.ids, 1, 7 * n) for n, prompt in enumerate(prompts)]
    played = episodes(*arguments, **keywords).play(requests, prompts, Clock())
    return [response for of_prompt in played for response in of_prompt]


def rendered(response: Response, tokenizer: Any = TOKENIZER) -> list[int]:
    """Return the conversation as the chat template renders it, up to the last response's end."""
    messages = [*response.prompt.messages, *response.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def scored(responses: Sequence[Response]) -> list[ScoredResponse]:
    return [
        ScoredResponse(response, n, sum(turn.reward for turn in response.turns))
        for n, response in enumerate(responses)
    ]
