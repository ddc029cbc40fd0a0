"""Compare prompts and ends of responses with the training: template, tokens, EOS, context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from tasks.core.report import Cause, Row
from tasks.verify.compare import Asked
from tasks.verify.reference import Probe, Reference
from tasks.verify.server import Prompt, ServerError, UnsupportedError
from tasks.witness.plumbline_witness.probes import LIMIT

_WINDOW = 6
"""Tokens of a difference that are shown."""
_LIKELY = math.log(0.5)
_FORCED = 100.0
"""Bias that makes a token certain: the most that APIs take."""
_LONGEST = 4096
"""Tokens of the prompt that looks for silent cuts."""


class Difference(NamedTuple):
    """First difference of two token sequences, and a few tokens of both from there on."""

    kind: str  # a key of `_CAUSES`; "" if nothing tells the cause
    position: int
    trained: tuple[int, ...]
    served: tuple[int, ...]

    def details(self) -> dict[str, float | str]:
        """Return position and tokens for a report."""
        trained, served = str(self.trained), str(self.served)
        return {"position": self.position, "trained": trained, "served": served}


def template(asked: Asked) -> Row:
    """Compare the server's rendering of the conversations with the training's."""
    name = "template"
    chats = [probe for probe in asked.reference.tokenised if probe.messages]
    if not chats:
        return Row(name, "unknown", "the reference has no conversations")
    differing: list[tuple[Probe, Difference]] = []
    try:
        for probe in chats:
            rendered = asked.server.render(asked.model, probe.messages or (), probe.tools)
            if differs := _difference(asked, _ids(asked, probe), rendered):
                differing.append((probe, differs))
    except UnsupportedError:
        return _lengths(asked, chats)
    except ServerError as error:
        if error.code != "request":
            raise
        if probe.tools and not differing:  # as some do without a parser of calls
            text = f"the server refuses a conversation with tools: {error.message}"
            return Row(name, "unknown", text)
        text = f"the server refuses a conversation: {error.message}"
        return Row(name, "fault", text, causes=_cause(name))
    measured: dict[str, float | str] = {"conversations": len(chats), "differing": len(differing)}
    if not differing:
        return Row(name, "ok", f"{len(chats)} conversations, the same tokens", measured)
    probe, first = differing[0]
    text = (
        f"{len(differing)} of {len(chats)} conversations differ; number {probe.number} at token "
        f"{first.position}: {_shown(asked, first)}"
    )
    causes = _template_causes(asked, chats, differing)
    return Row(name, "fault", text, measured | first.details(), causes)


def _ids(asked: Asked, probe: Probe) -> tuple[int, ...]:
    """Return the ids of a conversation; by the server's tokenizer if only its text is known."""
    return probe.ids or asked.server.tokenize(asked.model, probe.text or "", special=False)


def _lengths(asked: Asked, chats: Sequence[Probe]) -> Row:
    """Compare numbers of tokens, where a server tells no ids: a difference is a fault."""
    name = "template"
    # Some servers leave tools out where none may be called.
    chats = [probe for probe in chats if not probe.tools]
    for probe in chats:
        ids = _ids(asked, probe)
        length = asked.server.generate(asked.model, probe.messages or (), 1)[0].prompt_length
        if length is None:
            return Row(name, "unknown", "the server does not tell the tokens of a conversation")
        if length < len(ids) or (length > len(ids) and len(ids) < LIMIT):
            text = f"conversation {probe.number} has {length} tokens, {len(ids)} in training"
            measured = {"served": float(length), "trained": float(len(ids))}
            return Row(name, "fault", text, measured, _cause(name))
    text = f"{len(chats)} conversations have as many tokens as in training; not told which"
    return Row(name, "unknown", text)


def _template_causes(
    asked: Asked, chats: Sequence[Probe], differing: Sequence[tuple[Probe, Difference]]
) -> tuple[Cause, ...]:
    with suppress(UnsupportedError):
        if any(cause.code == "tokenizer" for cause in tokens(asked).causes):
            return _cause("tokenizer")
    if kinds := {differs.kind for _, differs in differing} - {""}:
        return _cause(*sorted(kinds))
    wrong = {probe.number for probe, _ in differing}
    own = {chat.number for chat in chats if (chat.messages or ({},))[0].get("role") == "system"}
    plain = {chat.number for chat in chats if not chat.tools} - own
    # All without a system prompt of their own differ, and none that has one.
    is_default = plain and plain <= wrong and own and not own & wrong
    return _cause("system-prompt" if is_default else "template")


def tokens(asked: Asked) -> Row:
    """Compare the server's tokens of the public texts with the training's."""
    name, kinds = "tokens", ("text", "prompt")
    texts = [probe for probe in asked.reference.tokenised if probe.kind in kinds and probe.text]
    if not texts:
        return Row(name, "unknown", "the reference has no texts; a witness has them")
    for probe in texts:
        served = asked.server.tokenize(asked.model, probe.text or "")
        if differs := _difference(asked, probe.ids, served):
            place = f"{probe.kind} {probe.number} differs at token {differs.position}"
            code = "bos" if differs.kind == "bos" else "tokenizer"
            line = f"{place}: {_shown(asked, differs)}"
            return Row(name, "fault", line, differs.details(), _cause(code))
    return Row(name, "ok", f"{len(texts)} texts, the same tokens", {"texts": len(texts)})


def _difference(asked: Asked, ids: Sequence[int], other: Sequence[int]) -> Difference | None:
    """Return the first difference of the training's tokens and the server's; None without one."""
    trained, served, cut = tuple(ids), tuple(other), len(ids) >= LIMIT  # the rest is unknown
    if trained == (served[: len(trained)] if cut else served):
        return None
    pairs = enumerate(zip(trained, served, strict=False))
    at = next((at for at, (t, s) in pairs if t != s), min(len(trained), len(served)))
    bos, kind = asked.reference.token_settings("tokenizer").get("bos_token_id"), ""
    for longer, shorter in ((served, trained), (trained, served)):
        rest = longer[1:]
        size = min(len(rest), len(shorter)) if cut else max(len(rest), len(shorter))
        if bos in (None, *longer[:1]) and rest and rest[:size] == shorter[:size]:
            kind = "bos"
    if not kind and at in (len(trained), len(served)):
        kind = "generation-prompt"
    window = slice(at, at + _WINDOW)
    return Difference(kind, at, trained[window], served[window])


def _shown(asked: Asked, differs: Difference) -> str:
    """Return both sides around a difference, as text where the reference has a tokenizer."""
    sides: list[Any] = [list(differs.trained), list(differs.served)]
    path = asked.reference.folder / "tokenizer.json"
    if path.is_file() and find_spec("tokenizers") is not None:
        from tokenizers import Tokenizer

        decode = Tokenizer.from_file(str(path)).decode
        sides = [repr(decode(ids, skip_special_tokens=False)) for ids in sides]
    return f"training {sides[0]}, server {sides[1]}"


def eos(asked: Asked) -> Row:
    """Check that the server ends a response at the tokens that end a turn of the trained model.

    Where the fingerprint says that the model ends its turn, it generates freely; besides, each such
    token is forced by a bias, which needs no likely position.
    """
    name, reference = "eos", asked.reference
    ends = reference.every_end
    if not ends:
        return Row(name, "unknown", "the reference names no EOS")
    likely = _likely_ends(reference, ends)
    wanted = sorted({token for _, token in likely}) or [ends[0]]
    chat = next((probe for probe in reference.probes if probe.messages), None)
    messages = (chat.messages if chat else None) or ({"role": "user", "content": "Hello"},)
    seen: set[int] = set()
    for token in wanted:
        prompts = [prefix for prefix, end in likely if end == token][:2]
        any_prompt = prompts[0] if prompts else (chat or reference.probes[0]).ids
        bias = {"logit_bias": {str(token): _FORCED}}
        tries: list[tuple[Prompt, Mapping[str, Any]]] = [(prompt, {}) for prompt in prompts]
        tries += [(any_prompt, bias), (messages, bias)]
        for prompt, options in tries:
            stopped = _stops(asked, prompt, token, options)
            if stopped is False:
                text = f"the server generates on after token {token}, which ends a turn"
                return Row(name, "fault", text, {"token": token}, _cause("eos-missing"))
            if stopped:
                seen.add(token)
                if options:
                    break
    stops_at = ", ".join(map(str, sorted(seen)))
    if seen != set(wanted):
        text = f"not all of the tokens {wanted} were generated, and the server takes no bias"
        return Row(name, "unknown", text, {"stops_at": stops_at})
    return Row(name, "ok", f"responses end at token {stops_at}", {"stops_at": stops_at})


def _likely_ends(reference: Reference, ends: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return prefixes after which the trained model ends its turn, and the token that does."""
    trained = reference.trained
    places = zip(reference.prefixes, trained.top1.tolist(), trained.logprobs.max(1), strict=True)
    return [(ids, token) for ids, token, best in places if token in ends and best > _LIKELY]


def _stops(asked: Asked, prompt: Prompt, token: int, options: Mapping[str, Any]) -> bool | None:
    """Return True if a response ended at a token; None if the token was not generated."""
    try:
        (made,) = asked.server.generate(asked.model, prompt, 2, temperature=0, **options)
    except ServerError as error:
        if isinstance(error, UnsupportedError) or (error.code == "request" and options):
            return None
        raise
    if made.finish == "stop":
        return True
    if made.ids is not None:
        return False if made.ids[:1] == (token,) else None
    return False if options and not made.text else None


def context(asked: Asked) -> Row:
    """Check the server's context: as long as the training's rows, and nothing is cut silently."""
    name, reference, length = "context", asked.reference, asked.length(asked.model)
    trained = max((int(reference.facts.get("longest_row") or 0), *map(len, reference.sequences)))
    measured: dict[str, float | str] = {"trained": trained}
    if length is not None:
        measured["served"] = length
        if length < trained:
            text = f"the server takes {length} tokens, a row of the training data has {trained}"
            limit = {"served": float(trained)}
            return Row(name, "fault", text, measured, _cause("context-short"), limit)
    size = min(max(trained, 512), _LONGEST, length - 1 if length else _LONGEST)
    joined = [token for ids in reference.sequences for token in ids]
    prompt = (joined * (size // len(joined) + 1))[:size]
    try:
        (made,) = asked.server.generate(asked.model, prompt, 1, temperature=0)
    except ServerError as error:
        if error.code != "length":
            raise
        text = f"a prompt of {size} tokens is refused: {error.message}"
        if size <= trained:
            return Row(name, "fault", text, measured, _cause("context-short"))
        return Row(name, "ok", text, measured)
    used = len(made.prompt_ids) if made.prompt_ids is not None else made.prompt_length
    if used is None:
        return Row(name, "unknown", "the server does not tell the prompt's length", measured)
    measured |= {"sent": size, "used": used}
    if used < size:
        text = f"of a prompt of {size} tokens the server used {used}"
        return Row(name, "fault", text, measured, _cause("context-cut"), {"used": float(size)})
    return Row(name, "ok", f"a prompt of {size} tokens was used whole", measured)


def _cause(*codes: str) -> tuple[Cause, ...]:
    return tuple(Cause(code, *_CAUSES[code]) for code in codes)


_TEMPLATE = "vllm serve --chat-template <chat_template.jinja of the training>"
_CAUSES = {
    "tokenizer": (
        "the server has the tokenizer of another model",
        "vllm serve --tokenizer <the folder of the training's tokenizer>",
    ),
    "template": ("the server renders conversations with another chat template", _TEMPLATE),
    "bos": (
        "BOS comes twice, or only in training, or only on the server",
        "set add_bos_token in tokenizer_config.json of the served folder to what training had; "
        "twice: the chat template has it, too, remove bos_token there",
    ),
    "system-prompt": (
        "only conversations without a system prompt differ: a default one is added, or lacks",
        f"{_TEMPLATE}, or send the same system prompt as in training",
    ),
    "generation-prompt": (
        "one prompt goes on where the other ends: the beginning of the assistant's turn, <think>",
        "serve the training's chat template with add_generation_prompt=true; check "
        "--default-chat-template-kwargs",
    ),
    "eos-missing": (
        "an EOS of the training is none on the server",
        "add the token to eos_token_id in generation_config.json of the served folder, and serve "
        "again",
    ),
    "context-short": (
        "the server's context is shorter than what was trained",
        "vllm serve --max-model-len <the training's length>",
    ),
    "context-cut": (
        "the server drops a part of long prompts without a word",
        "a longer context on the server: llama-server -c, or no truncate_prompt_tokens",
    ),
}
"""Text and hint by code."""
