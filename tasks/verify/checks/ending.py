"""Compare where prompts and responses end: at the EOS of the training, at the same length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.report import Cause, Row
from tasks.verify.asked import Asked
from tasks.verify.reference import Reference
from tasks.verify.servers.server import Prompt, ServerError, UnsupportedError

_LIKELY = math.log(0.5)
_FORCED = 100.0
"""Bias that makes a token certain: the most that APIs take."""
_LONGEST = 4096
"""Tokens of the prompt that looks for silent cuts."""
_SHORT = Cause(
    "context-short",
    "the server's context is shorter than what was trained",
    "vllm serve --max-model-len <the training's length>",
)


def eos(asked: Asked) -> Row:
    """Check that the server ends a response at the tokens that end a turn of the trained model.

    Where the fingerprint says that the model ends its turn, it generates freely; besides, each such
    token is forced by a bias, which needs no likely position.
    """
    reference = asked.reference
    ends = reference.every_end
    if not ends:
        return Row("eos", "unknown", "the reference names no EOS")
    likely = _likely_ends(reference, ends)
    wanted = sorted({token for _, token in likely}) or [ends[0]]
    seen: set[int] = set()
    for token in wanted:
        prompts = [prefix for prefix, end in likely if end == token][:2]
        chat = next((probe for probe in reference.probes if probe.messages), None)
        any_prompt = prompts[0] if prompts else (chat or reference.probes[0]).ids
        messages = (chat.messages if chat else None) or ({"role": "user", "content": "Hello"},)
        bias = {"logit_bias": {str(token): _FORCED}}
        tries: list[tuple[Prompt, Mapping[str, Any]]] = [(prompt, {}) for prompt in prompts]
        tries += [(any_prompt, bias), (messages, bias)]
        for prompt, options in tries:
            stopped = _stops(asked, prompt, token, options)
            if stopped is False:
                text = f"the server generates on after token {token}, which ends a turn"
                cause = Cause(
                    "eos-missing",
                    "an EOS of the training is none on the server",
                    "add the token to eos_token_id in generation_config.json of the served folder, "
                    "and serve again",
                )
                return Row("eos", "fault", text, {"token": token}, (cause,))
            if stopped:
                seen.add(token)
                if options:
                    break
    measured = {"stops_at": ", ".join(map(str, sorted(seen)))}
    if seen != set(wanted):
        missing = ", ".join(map(str, sorted(set(wanted) - seen)))
        reason = f"token {missing} was never generated, and the server takes no bias"
        return Row("eos", "unknown", reason, measured)
    return Row("eos", "ok", f"responses end at token {measured['stops_at']}", measured)


def _stops(asked: Asked, prompt: Prompt, token: int, options: Mapping[str, Any]) -> bool | None:
    """Return True if a response ended at a token; None if the token was not generated."""
    try:
        (made,) = asked.server.generate(asked.model, prompt, 2, temperature=0, **options)
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


def context(asked: Asked) -> Row:
    """Check the server's context: as long as the training's rows, and nothing is cut silently."""
    reference, length = asked.reference, asked.length(asked.model)
    row = reference.facts.get("longest_row")
    trained = max((row if isinstance(row, int) else 0, *map(len, reference.sequences)))
    measured: dict[str, float | str] = {"trained": trained}
    if length is not None:
        measured["served"] = length
        if length < trained:
            text = f"the server takes {length} tokens, a row of the training data has {trained}"
            return Row("context", "fault", text, measured, (_SHORT,), {"served": float(trained)})
    size = max(trained, 512)
    size = min(size, _LONGEST, length - 1 if length else size)
    joined = [token for ids in reference.sequences for token in ids]
    prompt = (joined * (size // len(joined) + 1))[:size]
    try:
        (made,) = asked.server.generate(asked.model, prompt, 1, temperature=0)
    except ServerError as error:
        if error.code != "length":
            raise
        if size <= trained:
            text = f"a prompt of {size} tokens is refused: {error.message}"
            return Row("context", "fault", text, measured, (_SHORT,))
        return Row("context", "ok", f"a prompt of {size} tokens is refused, not cut", measured)
    used = len(made.prompt_ids) if made.prompt_ids is not None else made.prompt_length
    if used is None:
        return Row("context", "unknown", "the server does not tell the prompt's length", measured)
    measured |= {"sent": size, "used": used}
    if used < size:
        text = f"of a prompt of {size} tokens the server used {used}"
        cause = Cause(
            "context-cut",
            "the server drops a part of long prompts without a word",
            "a longer context on the server: llama-server -c, or no truncate_prompt_tokens",
        )
        return Row("context", "fault", text, measured, (cause,), {"used": float(size)})
    return Row("context", "ok", f"a prompt of {size} tokens was used whole", measured)


def _likely_ends(reference: Reference, ends: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return prefixes after which the trained model ends its turn, and the token that does."""
    trained = reference.trained
    places = zip(reference.prefixes, trained.top1.tolist(), trained.logprobs.max(1), strict=True)
    return [(ids, token) for ids, token, best in places if token in ends and best > _LIKELY]
