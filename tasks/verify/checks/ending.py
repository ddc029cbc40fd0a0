"""Compare where prompts and responses end: at the EOS of the training, at the same length.

eos         the server ends a response where the model ends its turn
context     prompts as long as in training are accepted, and none is cut silently
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.reference import Reference
from tasks.verify.servers.server import Prompt, Server, ServerError, UnsupportedError

_LIKELY = math.log(0.5)
_FORCED = 100.0
"""Bias that makes a token certain: the most that APIs take."""
_LONGEST = 4096
"""Tokens of the prompt that looks for silent cuts."""
_SPLIT = 0.8
"""Least share of a prompt's tokens that a server has which splits its text again."""


def eos(answers: Answers, model: str, base: str | None) -> Check:
    """Check that the server ends a response at the tokens that end a turn of the trained model.

    Where the fingerprint says that the model ends its turn, it generates freely; besides, each such
    token is forced by a bias, which needs no likely position.
    """
    server, reference = answers.server, answers.reference
    ends = _ends(reference)
    if not ends:
        return Check("eos", "unknown", "the reference names no EOS")
    likely = _likely_ends(reference, ends)
    wanted = sorted({token for _, token in likely}) or [ends[0]]
    seen: set[int] = set()
    for token in wanted:
        prompts = [prefix for prefix, end in likely if end == token][:2]
        prompts = prompts if server.abilities.token_ids else []
        tries: list[tuple[Prompt, Mapping[str, Any]]] = [(prompt, {}) for prompt in prompts]
        bias = {"logit_bias": {str(token): _FORCED}}
        tries.append((prompts[0] if prompts else _prompt(server, reference), bias))
        for prompt, options in tries:
            stopped = _stops(server, model, prompt, token, options)
            if stopped is False:
                return Check(
                    "eos", "fault",
                    f"the server generates on after token {token}, which ends a turn",
                    {"token": token},
                    causes=(_CAUSES["eos-missing"],),
                )  # fmt: skip
            if stopped:
                seen.add(token)
    measured = {"stops_at": ", ".join(map(str, sorted(seen)))}
    if seen != set(wanted):
        missing = ", ".join(map(str, sorted(set(wanted) - seen)))
        reason = f"token {missing} was never generated, and the server takes no bias"
        return Check("eos", "unknown", reason, measured)
    return Check("eos", "ok", f"responses end at token {measured['stops_at']}", measured)


def _stops(
    server: Server, model: str, prompt: Prompt, token: int, options: Mapping[str, Any]
) -> bool | None:
    """Return True if a response ended at a token; None if the token was not generated."""
    try:
        (made,) = server.generate(model, prompt, 2, temperature=0, **options)
    except UnsupportedError:
        return None
    except ServerError as error:
        if error.code == "request" and options:
            return None
        raise
    if made.finish == "stop":
        return True
    if made.ids is not None:
        return False if made.ids[:1] == (token,) else None
    return False if options and not made.text else None


def context(answers: Answers, model: str, base: str | None) -> Check:
    """Check the server's context: as long as the training's rows, and nothing is cut silently."""
    server, reference = answers.server, answers.reference
    length = answers.length(model)
    trained = max((_trained_length(reference), *map(len, reference.sequences)))
    measured: dict[str, float | str] = {"trained": trained}
    if length is not None:
        measured["served"] = length
        if length < trained:
            return Check(
                "context", "fault",
                f"the server takes {length} tokens, a row of the training data has {trained}",
                measured, {"served": float(trained)}, (_CAUSES["context-short"],),
            )  # fmt: skip
    size = max(trained, 512)
    size = min(size, _LONGEST, length - 1 if length else size)
    prompt = _repeated(server, reference, size)
    try:
        (made,) = server.generate(model, prompt, 1, temperature=0)
    except ServerError as error:
        if error.code != "length":
            raise
        if size <= trained:
            return Check(
                "context", "fault", f"a prompt of {size} tokens is refused: {error.message}",
                measured, causes=(_CAUSES["context-short"],),
            )  # fmt: skip
        return Check("context", "ok", f"a prompt of {size} tokens is refused, not cut", measured)
    used = len(made.prompt_ids) if made.prompt_ids is not None else made.prompt_length
    if used is None:
        return Check("context", "unknown", "the server does not tell the prompt's length", measured)
    measured |= {"sent": size, "used": used}
    if used < (size if server.exact else _SPLIT * size):
        return Check(
            "context", "fault", f"of a prompt of {size} tokens the server used {used}",
            measured, {"used": float(size)}, (_CAUSES["context-cut"],),
        )  # fmt: skip
    return Check("context", "ok", f"a prompt of {size} tokens was used whole", measured)


def _trained_length(reference: Reference) -> int:
    length = reference.facts.get("longest_row")
    return length if isinstance(length, int) else 0


def _repeated(server: Server, reference: Reference, size: int) -> list[int]:
    """Return a prompt of `size` tokens: texts one after the other where ids become a text."""
    texts = [probe.ids for probe in reference.probes if probe.kind == "text"]
    sequences = reference.sequences if server.exact or not texts else texts[:1]
    joined = [token for ids in sequences for token in ids]
    return (joined * (size // len(joined) + 1))[:size]


def _prompt(server: Server, reference: Reference) -> Prompt:
    """Return a conversation: as token ids of the training, if the server takes them."""
    chat = next((probe for probe in reference.probes if probe.messages), None)
    if server.abilities.token_ids:
        return (chat or reference.probes[0]).ids
    return (chat.messages if chat else None) or ({"role": "user", "content": "Hello"},)


def _ends(reference: Reference) -> list[int]:
    """Return the tokens that may end a turn: the tokenizer's EOS, and those of the settings."""
    facts = reference.facts.get("tokens") or {}
    ends: list[int] = []
    for key in ("tokenizer", "generation_config", "config"):
        value = (facts.get(key) or {}).get("eos_token_id")
        ends += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
    return list(dict.fromkeys(ends))


def _likely_ends(reference: Reference, ends: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return prefixes after which the trained model ends its turn, and the token that does."""
    print_ = reference.trained
    likely, at = [], 0
    for ids in reference.sequences:
        for end in range(1, len(ids)):
            token = int(print_.top1[at])
            value = np.where(print_.ids[at] == token, print_.logprobs[at], -np.inf).max()
            if token in ends and value > _LIKELY:
                likely.append((tuple(ids[:end]), token))
            at += 1
    return likely


_CAUSES = {
    cause.code: cause
    for cause in (
        Cause(
            "eos-missing",
            "an EOS of the training is none on the server",
            "add the token to eos_token_id in generation_config.json of the served folder, "
            "and serve again",
        ),
        Cause(
            "context-short",
            "the server's context is shorter than what was trained",
            "vllm serve --max-model-len <the training's length>",
        ),
        Cause(
            "context-cut",
            "the server drops a part of long prompts without a word",
            "a longer context on the server: Ollama num_ctx, llama-server -c, or "
            "no truncate_prompt_tokens",
        ),
    )
}
