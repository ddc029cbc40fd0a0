"""Prompts of a smoke test: held-out conversations, raw texts, pairs of answers, or the probes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tasks.config.after_training import Smoke
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
HELDOUT = "heldout.jsonl"
ROWS_AT_MOST = 2000
"""Maximum number of held-out rows to read."""
TEXTS_AT_ONCE = 64
PROMPT_TOKENS = 64
"""Tokens of a text that become the prompt; half of a shorter text."""
T = TypeVar("T")


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


@dataclass(frozen=True)
class Setup:
    """Arguments of one smoke test beside its models and prompts."""

    out: Path  # folder of its report
    settings: Smoke
    profile: DriftLimit
    tools: Tools
    log: Log

    @property
    def scorer(self) -> ReferenceScorer:
        """The transformers reference."""
        return self.tools.scorer

    @property
    def logs(self) -> dict[str, Any]:
        """Arguments of child processes."""
        return {"log": self.log, "log_path": self.tools.log_path}


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
    most = max(settings.eval_samples, len(probes))
    if kind == "texts":
        texts = _read(data / HELDOUT, lambda row: str(row["text"]))
        encoded = scorer.encode_texts(served.path, texts[:most], limit=2 * PROMPT_TOKENS)
        tokens = [ids[: min(PROMPT_TOKENS, max(1, len(ids) // 2), room)] for ids in encoded if ids]
        if room < 1 or not tokens:
            raise _no_room(len(texts), settings)
        stops = stop_ids(served.path, None)
        check = _known_probes(probes, texts, scorer, served.path, stops)
        # Without a template both models read the same.
        sides = Side(served, tokens, stops), Side(base, tokens, stops)
        return Question(*sides, reference, checks=(check,))
    rows = _read(data / HELDOUT, _conversation)
    rendered = scorer.encode(served.path, rows)
    usable = [
        number
        for number, prompt in enumerate(rendered.tokens)
        if len(prompt) <= room and rows[number].get("desirable", True)
    ]
    if not usable:
        raise _no_room(len(rows), settings)
    chosen = usable[:most]
    chosen_rows = [rows[number] for number in chosen]
    before = scorer.encode(base.path, chosen_rows, template_from=served.path)
    return Question(
        Side(served, [rendered.tokens[number] for number in chosen], rendered.eos),
        Side(base, before.tokens, sorted({*rendered.eos, *before.eos})),
        reference,
        rows=chosen_rows,
        left_out=len(rows) - len(usable),
        checks=(probes_check(probes, rendered.tokens),),
        temperature=temperature,
    )


def _no_room(count: int, settings: Smoke) -> DataError:
    return DataError(
        f"none of {count} held-out rows leaves room for {settings.max_new_tokens} new tokens, and "
        "is not marked as undesirable",
        hint="smoke.max_new_tokens=... (smaller), or data.eval_path=<other rows>",
    )


def _known_probes(
    probes: Sequence[Sequence[int]],
    texts: Sequence[str],
    scorer: ReferenceScorer,
    served: Path,
    ends: Sequence[int],
) -> Check:
    """Check that the served tokenizer gives training's tokens: each probe is part of a text."""
    missing = {_as_text(probe) for probe in probes}
    total = len(missing)
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        some = scorer.encode_texts(served, texts[start : start + TEXTS_AT_ONCE], limit=1 << 30)
        whole = "".join(_as_text([*ids, end]) for ids in some for end in ends)
        missing = {probe for probe in missing if probe not in whole}
        if not missing:
            break
    return Check(
        "texts as training tokenised them",
        "a run of tokens for every probe",
        f"{total - len(missing)} of {total}",
        ok=not missing,
    )


def _as_text(ids: Sequence[int]) -> str:
    """Return token ids as a text in which a run of ids is a part."""
    return f" {' '.join(map(str, ids))} "


def read_pairs(served: Path, data: Path, setup: Setup) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of held-out pairs (chosen, rejected) that fit the context.

    Raises DataError if no pair fits.
    """
    settings, scorer = setup.settings, setup.scorer
    rows = _read(data / HELDOUT, _pair)[: settings.eval_samples]
    texts = scorer.encode_whole(served, [each for pair in rows for each in pair])
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


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a conversation, a pair as the one with the chosen answer.

    A prompt for online training may have no answer.
    """
    if "chosen" in row:
        row = {**row, "messages": [*row["prompt"], *row["chosen"]]}
    if row["messages"][-1]["role"] != "assistant" and "columns" not in row:
        raise ValueError("the last message is not the assistant's")
    return row


def _pair(row: dict[str, Any]) -> tuple[Chat, Chat]:
    rejected = chat([*row["prompt"], *row["rejected"]], row)
    return chat(_conversation(row)["messages"], row), rejected


def _read(path: Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Return the first held-out rows. Raises DataError, with the line that cannot be parsed."""
    rows: list[T] = []
    try:
        with path.open(encoding="utf-8") as file:
            rows.extend(parse(json.loads(line)) for line in itertools.islice(file, ROWS_AT_MOST))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}:{len(rows) + 1}: not a row of this kind: {error!r}") from error
    if not rows:
        raise DataError(f"{path} is empty: nothing to evaluate on", hint="data.eval_fraction=0.05")
    return rows


def answer_of(row: Mapping[str, Any]) -> str | None:
    """Return the expected answer of a row.

    None if the row is a prompt alone, or its answer is more than a text: a template writes calls of
    tools and reasoning in its own way.
    """
    last = row["messages"][-1]
    more = last.keys() & {"tool_calls", *REASONING}
    return str(last["content"]) if last["role"] == "assistant" and not more else None
