"""Prompts of a smoke test: held-out conversations, raw texts, pairs of answers, or the probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tasks.config.after_training import Smoke
from tasks.core.contract import Check
from tasks.core.errors import DataError
from tasks.drift.fingerprint import Fingerprint
from tasks.evaluation import smoke_checks
from tasks.evaluation.evaluation_prompts import (
    answerable,
    context_of,
    read_heldout,
    read_pairs,
    read_texts,
)
from tasks.evaluation.scoring import ModelRef, Prompts, ReferenceScorer
from tasks.evaluation.serve import Question
from tasks.serving.prompts import stop_ids

HELDOUT = "heldout.jsonl"
PROMPT_TOKENS = 64
"""Tokens of a text that become the prompt; half of a shorter text."""
TEXTS_AT_ONCE = 64


def probes(served: ModelRef, reference: Path) -> Question:
    """Return the probes of the reference as prompts."""
    tokens = [list(probe) for probe in Fingerprint.load(reference).probes]
    prompts = Prompts(tokens, stop_ids(served.path, None))
    return Question(served, None, reference, prompts, prompts)


def conversations(
    served: ModelRef,
    base: ModelRef,
    reference: Path,
    data: Path,
    settings: Smoke,
    scorer: ReferenceScorer,
) -> Question:
    """Return held-out conversations that leave room for a response.

    Raises:
        DataError: there are none.
    """
    trained_on = Fingerprint.load(reference).probes
    rows = read_heldout(data / HELDOUT)
    rendered = scorer.encode(served.path, rows)
    longest = longest_sequence_of(served.path, settings)
    usable = answerable(rows, rendered, longest=longest, answer=settings.max_new_tokens)
    chosen = usable[: max(settings.eval_samples, len(trained_on))]
    chosen_rows = [rows[i] for i in chosen]
    return Question(
        served=served,
        base=base,
        reference=reference,
        prompts=Prompts([rendered.tokens[i] for i in chosen], rendered.eos),
        base_prompts=scorer.encode(base.path, chosen_rows, template_from=served.path),
        rows=chosen_rows,
        left_out=len(rows) - len(usable),
        checks=(smoke_checks.probes_check(trained_on, rendered.tokens),),
    )


def raw_texts(
    served: ModelRef,
    base: ModelRef,
    reference: Path,
    data: Path,
    settings: Smoke,
    scorer: ReferenceScorer,
) -> Question:
    """Return the first tokens of held-out texts, which both models continue.

    Raises:
        DataError: no text leaves room for a continuation.
    """
    trained_on = Fingerprint.load(reference).probes
    texts = read_texts(data / HELDOUT)
    chosen = texts[: max(settings.eval_samples, len(trained_on))]
    room = longest_sequence_of(served.path, settings) - settings.max_new_tokens
    ids = scorer.encode_texts(served.path, chosen, limit=2 * PROMPT_TOKENS)
    tokens = [text[: min(PROMPT_TOKENS, max(1, len(text) // 2), room)] for text in ids if text]
    if room < 1 or not tokens:
        raise DataError(
            f"no held-out text of {len(chosen)} leaves room for "
            f"{settings.max_new_tokens} new tokens",
            hint="smoke.max_new_tokens=... (smaller), or other held-out texts",
        )
    prompts = Prompts(tokens, stop_ids(served.path, None))
    check = _known_probes(trained_on, texts, scorer, served.path, prompts.eos)
    # Without a template both models read the same.
    return Question(served, base, reference, prompts, prompts, checks=(check,))


def pairs(
    served: Path, data: Path, settings: Smoke, scorer: ReferenceScorer
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of held-out pairs (chosen, rejected) that fit the context.

    Raises:
        DataError: no pair fits.
    """
    chosen = read_pairs(data / HELDOUT)[: settings.eval_samples]
    texts = scorer.encode_whole(served, [each for pair in chosen for each in pair])
    encoded = list(zip(texts[::2], texts[1::2], strict=True))
    longest = longest_sequence_of(served, settings)
    fitting = [pair for pair in encoded if max(map(len, pair)) <= longest]
    if not fitting:
        raise DataError(
            f"none of {len(encoded)} held-out pairs fits into {longest} tokens",
            hint="smoke.max_model_len=... (larger), or other held-out data",
        )
    return fitting


def longest_sequence_of(served: Path, settings: Smoke) -> int:
    """Return the longest sequence of prompt and response that the engine accepts, in tokens."""
    context = context_of(served)
    return min(context, settings.max_model_len or context)


def _known_probes(
    probes: Sequence[Sequence[int]],
    texts: Sequence[str],
    scorer: ReferenceScorer,
    served: Path,
    ends: Sequence[int],
) -> Check:
    """Check that the served tokenizer gives training's tokens: each probe is part of a text."""
    left = {np.asarray(probe, np.int32).tobytes() for probe in probes}
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        if not left:
            break
        some = texts[start : start + TEXTS_AT_ONCE]
        for ids in scorer.encode_texts(served, some, limit=1 << 30):
            whole = list(_with_end(ids, ends))
            left = {probe for probe in left if not any(_contains(text, probe) for text in whole)}
    total = len({tuple(probe) for probe in probes})
    return Check(
        "texts as training tokenised them",
        "a run of tokens for every probe",
        f"{total - len(left)} of {total}",
        ok=not left,
    )


def _with_end(ids: Sequence[int], ends: Sequence[int]) -> Iterator[bytes]:
    """Yield a text followed by each of the ids that can end it, as bytes of int32."""
    for end in ends:
        yield np.asarray([*ids, end], np.int32).tobytes()


def _contains(whole: bytes, part: bytes) -> bool:
    """Return True if one sequence of int32 occurs in another one."""
    at = whole.find(part)
    while at % 4 and at >= 0:
        at = whole.find(part, at + 1)
    return at >= 0
