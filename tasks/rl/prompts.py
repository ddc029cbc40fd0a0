"""Tokenise the prompts of a dataset once, and choose the prompts of each iteration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.core.errors import DataError
from tasks.rl.responses import Prompt
from tasks.serving.prompts import question_of, render_one

if TYPE_CHECKING:
    from tasks.training.engine.deepspeed_engine import Ranks

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
