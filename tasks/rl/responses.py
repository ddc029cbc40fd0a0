"""Prompts, requests and responses with their rewards; the prompts of each iteration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import DataError
from tasks.serving.prompts import question_of, render_one
from tasks.serving.vllm.colocation import Generated

if TYPE_CHECKING:
    from tasks.training.engine.deepspeed_engine import Ranks


@dataclass(frozen=True)
class Prompt:
    """One prompt of the dataset with its token ids."""

    # the row of the dataset artifact: `id`, `messages`, `answer` if there is one, and any other
    # column of the user's data
    row: Mapping[str, Any]
    ids: NDArray[np.int32]  # (P,) token ids, including the chat template's generation prompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation without a reference answer at its end."""
        messages: list[dict[str, Any]] = question_of(self.row)["messages"]
        return messages


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    ids: NDArray[np.int32]  # (P,) token ids of the prompt
    seed: int  # the same for all responses to a prompt
    number: int = 0  # among the responses to the prompt
    limit: int | None = None  # token limit of the response; None: `rollout.max_new_tokens`

    @property
    def sampling_seed(self) -> int:
        """Seed of the response. The same prompt, weights and seed give the same response."""
        states = np.random.SeedSequence(self.seed).generate_state(self.number + 1, np.uint64)
        return int(states[-1] >> np.uint64(1))


@dataclass(frozen=True)
class Turn:
    """One response of an episode, and the environment's answer to it."""

    text: str  # the decoded response, without special tokens
    tokens: int  # number of sampled tokens, at least 1
    reward: float  # by the environment
    # the message that follows; None after the last turn
    observation: Mapping[str, str] | None = None
    # (o,) token ids between the response and the next one: the rendered observation and the
    # generation prompt; empty after the last turn
    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True)
class Response:
    """A response and its reward; with an environment, all of an episode."""

    prompt: Prompt  # the prompt
    # token ids and log-probabilities of the sampled tokens of all turns, in order. `ended` is False
    # if the token limit ended the response or episode
    generated: Generated
    text: str  # the decoded response, without special tokens; the last one of an episode
    turns: tuple[Turn, ...] = ()  # turns of an episode; empty without an environment
    done: bool = True  # True unless the environment waited for another response
    group: int = 0  # number of its prompt within the iteration
    reward: float = 0.0  # weighted sum of all parts, once it is scored
    parts: Mapping[str, float] = field(default_factory=dict)  # rewards by source, before weights

    @property
    def ids(self) -> NDArray[np.int32]:
        """(L,) token ids of the whole conversation: prompt, sampled tokens, observations."""
        return np.concatenate([self.prompt.ids, *self._pieces])

    @property
    def marks(self) -> NDArray[np.uint8]:
        """(L,) 1 for sampled tokens, which bear loss; 0 for the prompt and observations."""
        lengths = [len(self.prompt.ids), *map(len, self._pieces)]
        return np.repeat(np.arange(len(lengths)) % 2, lengths).astype(np.uint8)

    @property
    def turn_rewards(self) -> NDArray[np.float32]:
        """(n,) the environment's rewards, each at the last sampled token of its turn; else 0."""
        rewards: NDArray[np.float32] = np.zeros(len(self.generated.ids), np.float32)
        ends = np.cumsum([turn.tokens for turn in self.turns], dtype=np.int64) - 1
        rewards[ends] = [turn.reward for turn in self.turns]
        return rewards

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation after the prompt: responses and observations by turns."""
        if not self.turns:
            return [{"role": "assistant", "content": self.text}]
        messages: list[dict[str, str]] = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            messages += [dict(turn.observation)] if turn.observation is not None else []
        return messages

    @property
    def _pieces(self) -> list[NDArray[np.int32]]:
        """Sampled tokens and observations by turns; an observation follows every response."""
        if not self.turns:
            return [self.generated.ids]
        ends = np.cumsum([turn.tokens for turn in self.turns])[:-1]
        pairs = zip(np.split(self.generated.ids, ends), self.turns, strict=True)
        return [piece for ids, turn in pairs for piece in (ids, turn.ids)]


SHOWN = 20
"""Problems listed in an error."""


def load_prompts(path: Path, *, tokenizer: Any, limit: int, ranks: Ranks) -> tuple[Prompt, ...]:
    """Render and tokenise all prompts; each rank does a part, and every rank gets all of them.

    A final assistant message of a row is the reference answer and not part of the prompt. Raises
    DataError on every rank that names every row whose prompt cannot be used.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so no prompt can be rendered",
            hint="data.chat_template=<Jinja file>",
        )
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    begin, end = (len(rows) * part // ranks.world_size for part in (ranks.rank, ranks.rank + 1))
    parts = ranks.all_objects([_tokenised(row, tokenizer, limit) for row in rows[begin:end]])
    tokenised = [pair for part in parts for pair in part]
    problems = [problem for _, problem in tokenised if problem]
    if problems:
        longest = max(len(ids) for ids, _ in tokenised)
        keeps = f"rollout.max_prompt_len={longest} keeps all" if longest > limit else "fix them"
        raise DataError(
            f"{path.name}: {len(problems)} of {len(rows)} prompts cannot be used, first "
            f"{problems[0]}",
            details=problems[:SHOWN],
            hint=f"{keeps}, or remove them from the data",
        )
    if not rows:
        raise DataError(f"{path.name} has no prompts", hint="data.path=<file with prompts>")
    # The user's further columns stand beside `messages` and `id`.
    flat = ({**row.pop("columns", {}), **row} for row in rows)
    return tuple(Prompt(row, ids) for row, (ids, _) in zip(flat, tokenised, strict=True))


def _tokenised(row: Mapping[str, Any], tokenizer: Any, limit: int) -> tuple[NDArray[np.int32], str]:
    """Return the token ids of a row's prompt as a server renders it, and its problem or ""."""
    from jinja2 import TemplateError  # the preflight imports this module, too

    try:
        ids = np.asarray(render_one(tokenizer, question_of(row)), np.int32)
    except (TemplateError, KeyError) as error:
        return np.zeros(0, np.int32), f"{row['id']}: the chat template rejects it: {error}"
    long = f"{row['id']}: {len(ids)} tokens, more than rollout.max_prompt_len={limit}"
    return ids, long if len(ids) > limit else ""


@dataclass(frozen=True)
class PromptOrder:
    """Endless stream of prompts, epoch after epoch, each epoch in an order of its own."""

    total: int  # number of prompts in the dataset
    per_iteration: int  # prompts per iteration
    refill_rounds: int  # rounds in which groups without signal may be replaced
    seed: int  # seed of the order

    def numbers(self, start: int, count: int) -> list[int]:
        """Return the numbers in the dataset of `count` prompts from position `start` on."""
        positions = np.arange(start, start + count)
        orders = {
            int(epoch): np.random.default_rng([self.seed, int(epoch)]).permutation(self.total)
            for epoch in np.unique(positions // self.total)
        }
        return [int(orders[int(p) // self.total][int(p) % self.total]) for p in positions]


def request_seed(seed: int, iteration: int, number: int) -> int:
    """Return the seed for one prompt of an iteration; it does not depend on the rank."""
    state = np.random.SeedSequence([seed, iteration, number]).generate_state(1)
    return int(state[0]) & 0x7FFFFFFF
