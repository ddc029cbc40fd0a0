"""Prompts of a smoke test: held-out conversations, raw texts, pairs of answers, or the probes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.config.sections import Smoke
from tasks.core.contract import Check
from tasks.core.errors import DataError
from tasks.data.messages import REASONING
from tasks.drift.fingerprint import DriftLimit, Fingerprint
from tasks.evaluation.checks import probes_check
from tasks.evaluation.measuring import Explain
from tasks.evaluation.model_folder import context_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.process.output import Log
from tasks.serving.prompts import Chat, chat, question_of, stop_ids
from tasks.serving.vllm.job import VllmChild

PromptKind = Literal["chat", "texts", "pairs", "probes"]
ROWS_AT_MOST = 2000
"""Maximum number of held-out rows to read."""
TEXTS_AT_ONCE = 64
PROMPT_TOKENS = 64
"""Tokens of a text that become the prompt; half of a shorter text."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Arguments of a smoke test that do not change its result."""

    scorer: ReferenceScorer
    log_path: Path
    vllm: VllmChild = field(default_factory=VllmChild)
    # folder of llama.cpp, which serves a GGUF file; None for its programs on PATH
    llama_cpp: str | None = None
    # the model that the served one has to be, for transformers; None if unknown
    before: ModelRef | None = None
    explain: Explain | None = None  # says where two models part, after a failed drift check
    function_s: float = 0.0  # seconds for a call of the user's `eval.function`


@dataclass(frozen=True, kw_only=True)
class Setup(Tools):
    """Arguments of one smoke test beside its models and prompts."""

    out: Path  # folder of its report
    settings: Smoke
    profile: DriftLimit
    log: Log

    @property
    def logs(self) -> dict[str, Any]:
        """Arguments of child processes."""
        return {"log": self.log, "log_path": self.log_path}


@dataclass(frozen=True)
class Side:
    """A model, the token ids of its prompts, and the ids that end its responses."""

    model: ModelRef
    prompts: list[list[int]]
    stops: list[int]


@dataclass(frozen=True)
class Question:
    """The models to serve, and their prompts."""

    served: Side
    base: Side | None  # the model before training
    reference: Path  # fingerprint file
    # conversations of the prompts, with the answers that the data has; None for raw texts
    rows: Sequence[Mapping[str, Any]] | None = None
    left_out: int = 0  # held-out rows that were too long, or not suitable
    checks: tuple[Check, ...] = ()  # that the served tokenizer gives the tokens of training
    temperature: float | None = None  # None for greedy responses alone

    @property
    def sides(self) -> list[Side]:
        """The served model, and the one before training."""
        return [self.served] if self.base is None else [self.served, self.base]

    @property
    def chats(self) -> list[Chat] | None:
        """Conversations of the prompts, without answers; None for raw texts."""
        return None if self.rows is None else list(map(question_of, self.rows))


def read_question(
    kind: PromptKind,
    served: ModelRef,
    base: ModelRef | None,
    reference: Path,
    data: Path | None,
    setup: Setup,
    temperature: float | None = None,
) -> Question:
    """Return the prompts of a kind. Raises DataError if no held-out row can be used."""
    settings, scorer = setup.settings, setup.scorer
    probes = Fingerprint.load(reference).probes
    if kind == "probes" or base is None or data is None:
        side = Side(served, list(map(list, probes)), stop_ids(served.path, None))
        return Question(side, None, reference)
    room = longest_sequence(served.path, settings) - settings.max_new_tokens
    rows, most = _held_out(data), max(settings.eval_samples, len(probes))
    no_room = DataError(
        f"none of {len(rows)} held-out rows leaves room for {settings.max_new_tokens} new tokens, "
        "and is not marked as undesirable",
        hint="smoke.max_new_tokens=... (smaller), or data.eval_path=<other rows>",
    )
    if kind == "texts":
        texts = [str(row["text"]) for row in rows]
        encoded = scorer.encode_texts(served.path, texts[:most], limit=2 * PROMPT_TOKENS)
        tokens = [ids[: min(PROMPT_TOKENS, max(1, len(ids) // 2), room)] for ids in encoded if ids]
        if room < 1 or not tokens:
            raise no_room
        stops = stop_ids(served.path, None)
        check = _known_probes(probes, texts, scorer, served.path, stops)
        # Without a template both models read the same.
        sides = Side(served, tokens, stops), Side(base, tokens, stops)
        return Question(*sides, reference, checks=(check,))
    rendered = scorer.encode(served.path, rows)
    usable = [
        number
        for number, prompt in enumerate(rendered.tokens)
        if len(prompt) <= room and rows[number].get("desirable", True)
    ]
    if not usable:
        raise no_room
    chosen = [rows[number] for number in usable[:most]]
    before = scorer.encode(base.path, chosen, template_from=served.path)
    return Question(
        Side(served, [rendered.tokens[number] for number in usable[:most]], rendered.eos),
        Side(base, before.tokens, sorted({*rendered.eos, *before.eos})),
        reference,
        rows=chosen,
        left_out=len(rows) - len(usable),
        checks=(probes_check(probes, rendered.tokens),),
        temperature=temperature,
    )


def _held_out(data: Path) -> list[dict[str, Any]]:
    """Return the first rows of a dataset's `heldout.jsonl`, which has one at least."""
    with (data / "heldout.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in itertools.islice(file, ROWS_AT_MOST)]


def _known_probes(
    probes: Sequence[Sequence[int]],
    texts: Sequence[str],
    scorer: ReferenceScorer,
    served: Path,
    ends: Sequence[int],
) -> Check:
    """Check that the served tokenizer gives training's tokens: each probe is part of a text."""

    def written(ids: Sequence[int]) -> str:
        return f" {' '.join(map(str, ids))} "

    missing, total = set(map(written, probes)), len(set(probes))
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        some = scorer.encode_texts(served, texts[start : start + TEXTS_AT_ONCE], limit=1 << 30)
        whole = "".join(written([*ids, end]) for ids in some for end in ends)
        missing = {probe for probe in missing if probe not in whole}
        if not missing:
            break
    return Check(
        "texts as training tokenised them",
        "a run of tokens for every probe",
        f"{total - len(missing)} of {total}",
        ok=not missing,
    )


def read_pairs(served: Path, data: Path, setup: Setup) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of held-out pairs (chosen, rejected) that fit the context.

    Raises DataError if no pair fits.
    """
    settings, conversations = setup.settings, list[Chat]()
    for row in _held_out(data)[: settings.eval_samples]:
        answers = (row["chosen"], row["rejected"])
        conversations += (chat([*row["prompt"], *answer], row) for answer in answers)
    texts = setup.scorer.encode_whole(served, conversations)
    encoded = list(zip(texts[::2], texts[1::2], strict=True))
    longest = longest_sequence(served, settings)
    fitting = [pair for pair in encoded if max(map(len, pair)) <= longest]
    if not fitting:
        raise DataError(
            f"none of {len(encoded)} held-out pairs fits into {longest} tokens",
            hint="smoke.max_model_len=... (larger), or other held-out data",
        )
    return fitting


def longest_sequence(served: Path, settings: Smoke) -> int:
    """Return the longest sequence of prompt and response that the engine accepts, in tokens."""
    context = context_of(served)
    return min(context, settings.max_model_len or context)


def answer_of(row: Mapping[str, Any]) -> str | None:
    """Return the expected answer of a row.

    None if the row is a prompt alone, or its answer is more than a text: a template writes calls of
    tools and reasoning in its own way.
    """
    last = row["messages"][-1]
    more = last.keys() & {"tool_calls", *REASONING}
    return str(last["content"]) if last["role"] == "assistant" and not more else None
