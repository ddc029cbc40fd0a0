"""Responses, ranks as threads, a scripted policy and real environments for the tests of rl."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from tasks.rl.environment import EnvironmentProcess, Episodes, ObservationTokens
from tasks.rl.metrics import Clock
from tasks.rl.responses import Prompt, Request, Response
from tasks.rl.rewards import Weighted
from tasks.serving.vllm.colocation import Generated
from tests.tiny import make_tokenizer

T = TypeVar("T")
LOG = logging.getLogger("tests.rl")
TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
WORDS = ("ape", "beetle", "cat", "a word that is much longer")
KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
"""Estimators of the KL from the difference of the log-probabilities of a token."""


def drawn(count: int, seed: int) -> torch.Tensor:
    """Return normal random numbers, (count,) float64."""
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def prompt_of(text: str, tokenizer: Any = TOKENIZER, **columns: Any) -> Prompt:
    """Return a prompt with the token ids that a server would read; `columns` are of its row."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Prompt({"id": text, "messages": messages, **columns}, np.array(ids, np.int32))


def response(
    question: str, text: str, /, *, tokenizer: Any = TOKENIZER, ended: bool = True, **columns: Any
) -> Response:
    """Return a response with the token ids that a server would read and sample."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [*ids, tokenizer.eos_token_id] if ended else ids
    generated = Generated(np.array(ids, np.int32), np.zeros(len(ids), np.float32), ended)
    about = {"id": f"row of {question[:30]}", **columns}
    return Response(prompt_of(question, tokenizer, **about), generated, text)


def responses(**columns: Any) -> list[Response]:
    """Return one response for each of `WORDS`, which it repeats."""
    return [response(f"copy {word}", word, answer=word, **columns) for word in WORDS]


def judge(
    rule: Callable[[Response], float], name: str = "function", weight: float = 2.0
) -> Weighted:
    """Return a reward source with a rule."""
    return Weighted(name, weight, lambda responses: [rule(response) for response in responses])


@dataclass(frozen=True)
class Peer:
    """A rank as a thread of this process: the part of `Ranks` that needs no tensors."""

    rank: int
    world_size: int
    gate: threading.Barrier
    objects: list[Any]
    device: Any = "cpu"

    def all_objects(self, value: T) -> list[T]:
        self.objects[self.rank] = value
        self.gate.wait(60)
        objects = list(self.objects)
        self.gate.wait(60)
        return objects


def alone() -> Any:
    """Return the only rank."""
    return Peer(0, 1, threading.Barrier(1), [None])


def on_ranks(count: int, work: Callable[[Any], T]) -> list[T]:
    """Return `work(ranks)` of each rank; raise the error of any of them."""
    gate, objects = threading.Barrier(count), [None] * count

    def run_rank(rank: int) -> T:
        try:
            return work(Peer(rank, count, gate, objects))
        except BaseException:
            gate.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


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
Open = Callable[..., Any]
PROMPTS = [prompt_of(f"p{n}") for n in range(6)]


@dataclass
class Player:
    """An engine that writes what `policy` says, by the seed of a request; counts its calls."""

    policy: Callable[[Request], str] = lambda request: f"{request.seed % 97}-{request.number}"
    limit: int = 200
    seen: list[list[Request]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Generated]:
        self.seen.append(list(requests))
        return list(map(self._response, requests))

    def _response(self, request: Request) -> Generated:
        ids = [*TOKENIZER(self.policy(request), add_special_tokens=False)["input_ids"], END]
        kept = np.array(ids[: request.limit or self.limit], np.int32)
        logprobs = -np.arange(1, len(kept) + 1, dtype=np.float32)
        return Generated(kept, logprobs, len(kept) == len(ids))


def episodes(
    engine: Player, environment: EnvironmentProcess, *, ranks: Any = None, budget: int = 200,
    role: str = "user", tokenizer: Any = TOKENIZER,
) -> Episodes:  # fmt: skip
    observations = ObservationTokens(tokenizer, [tokenizer.eos_token_id], role)
    return Episodes(engine, environment, observations, ranks or alone(), 8, budget)  # type: ignore[arg-type]


def play(prompts: Sequence[Prompt], *arguments: Any, **keywords: Any) -> list[Response]:
    requests = [Request(prompt.ids, 7 * n) for n, prompt in enumerate(prompts)]
    return episodes(*arguments, **keywords).play(requests, prompts, Clock())


def rendered(response: Response) -> list[int]:
    """Return the conversation as the chat template renders it, up to the last response's end."""
    messages = [*response.prompt.messages, *response.messages]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False).rstrip("\n")
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def scored(responses: Sequence[Response]) -> list[Response]:
    return [
        replace(each, group=n, reward=sum(turn.reward for turn in each.turns))
        for n, each in enumerate(responses)
    ]
