"""The prompts of a dataset, tokenised once, and which of them each iteration asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from tasks.core.errors import DataError
from tasks.rl.experience.responses import Prompt
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.tokens.rows import RowFile

CHUNK = 512
SHOWN = 20


class _Part(NamedTuple):
    """A rank's share: token ids by row, and what is wrong with rows."""

    ids: list[NDArray[np.int32]]
    problems: list[str]


def load_prompts(path: Path, *, tokenizer: Any, limit: int, ranks: Ranks) -> tuple[Prompt, ...]:
    """Render and tokenise every row's prompt; each rank does its share and all know the result.

    Args:
        path: JSON Lines with `messages` a row; an answer at their end is the reference answer, and
            no part of the prompt.
        tokenizer: with a chat template.
        limit: longest prompt, in tokens.
        ranks: all of them take part.

    Raises:
        DataError: on every rank, naming every row that cannot be asked.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so no prompt can be rendered",
            hint="data.chat_template=<Jinja file>",
        )
    rows = RowFile(path)
    total, world = len(rows), ranks.world_size
    begin, end = (total * part // world for part in (ranks.rank, ranks.rank + 1))
    parts = ranks.all_objects(_tokenised(rows, range(begin, end), tokenizer, limit))
    problems = [problem for part in parts for problem in part.problems]
    if problems:
        longest = max(len(ids) for part in parts for ids in part.ids)
        keeps = f"rollout.max_prompt_len={longest} keeps all" if longest > limit else "correct them"
        raise DataError(
            f"{path.name}: {len(problems)} of {total} prompts cannot be asked, first {problems[0]}",
            details=problems[:SHOWN],
            hint=f"{keeps}, or leave them out of the data",
        )
    if not total:
        raise DataError(f"{path.name} has no prompts", hint="data.path=<file with prompts>")
    ids = [one for part in parts for one in part.ids]
    prompts = tuple(Prompt(_flat(rows[n]), one) for n, one in enumerate(ids))
    rows.close()
    return prompts


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the columns that travelled along beside its own."""
    return {**row.pop("columns", {}), **row}


def _tokenised(rows: RowFile, numbers: range, tokenizer: Any, limit: int) -> _Part:
    found, problems = [], []
    for start in range(0, len(numbers), CHUNK):
        chosen = [rows[n] for n in numbers[start : start + CHUNK]]
        texts = []
        for row in chosen:
            try:
                texts.append(render(row["messages"], tokenizer))
            except (TemplateError, KeyError) as error:
                problems.append(f"{row['id']}: the chat template refuses it: {error}")
                texts.append("")
        several = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for row, ids in zip(chosen, several, strict=True):
            if len(ids) > limit:
                problems.append(
                    f"{row['id']}: {len(ids)} tokens, more than rollout.max_prompt_len={limit}"
                )
            found.append(np.asarray(ids, np.int32))
    return _Part(found, problems)


def render(messages: Sequence[dict[str, str]], tokenizer: Any) -> str:
    """The prompt as a server renders it: without a reference answer, with the generation prompt."""
    asked = list(messages)
    if asked and asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    text: str = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return text


@dataclass(frozen=True)
class Asking:
    """Which prompts an iteration asks: a function of the seed and the iteration's number.

    Prompts come as one endless stream, epoch after epoch, each in an order of its own. An iteration
    owns the next `each` x (1 + `spare`) of it: those it asks, and those it may refill with.

    Attributes:
        total: prompts there are.
        each: prompts an iteration.
        spare: rounds that it may refill.
        seed: of the order.
    """

    total: int
    each: int
    spare: int
    seed: int

    def numbers(self, iteration: int, round_: int = 0) -> NDArray[np.int64]:
        """(each,) numbers of the prompts of iteration 1, 2, ... and refill round 0 to `spare`."""
        start = ((iteration - 1) * (1 + self.spare) + round_) * self.each
        places = np.arange(start, start + self.each)
        epochs = np.unique(places // self.total)
        orders = {
            int(epoch): np.random.default_rng([self.seed, int(epoch)]).permutation(self.total)
            for epoch in epochs
        }
        return np.array([orders[int(p) // self.total][int(p) % self.total] for p in places])

    def epoch_at(self, iteration: int) -> float:
        """Epochs of prompts asked once so many iterations are over."""
        return iteration * (1 + self.spare) * self.each / self.total


def request_seed(seed: int, iteration: int, number: int) -> int:
    """Seed of the replies to prompt `number` of an iteration: the same whoever asks it."""
    drawn = np.random.SeedSequence([seed, iteration, number]).generate_state(1)
    return int(drawn[0]) & 0x7FFFFFFF
