"""Compare the server's prompts with those of the training: chat template and tokeniser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unicodedata import normalize

from tasks.core.report import Cause, Row
from tasks.verify.asked import Asked
from tasks.verify.reference import Probe
from tasks.verify.servers.server import ServerError, UnsupportedError
from tasks.weights.tokens import prove_ids
from tasks.witness.plumbline_witness.probes import LIMIT

_WINDOW = 6
_FEWEST, _FEWEST_CUT = 3, 8
"""Tokens that have to agree after an insertion, so that it is one."""


@dataclass(frozen=True)
class Difference:
    """First difference of two token sequences.

    Attributes:
        kind: "bos-twice", "bos-added", "bos-missing", "inserted", "removed",
            "generation-prompt-missing", "generation-prompt-longer" or "other".
        position: first token that differs.
        trained: tokens of the training from there on, a few of them.
        served: tokens of the server from there on.
    """

    kind: str
    position: int
    trained: tuple[int, ...]
    served: tuple[int, ...]

    def details(self) -> dict[str, float | str]:
        """Return position and tokens for a report."""
        served = str(self.served)
        return {"position": self.position, "trained": str(self.trained), "served": served}


def template(asked: Asked) -> Row:
    """Compare the server's rendering of the conversations with the training's."""
    name, server, model = "template", asked.server, asked.model
    chats = [probe for probe in asked.reference.tokenised if probe.messages]
    if not chats:
        return Row(name, "unknown", "the reference has no conversations")
    bos = _bos(asked)
    differing: list[tuple[Probe, Difference]] = []
    try:
        for probe in chats:
            rendered = server.render(model, probe.messages or (), probe.tools)
            ids = _ids(asked, probe)
            differs = difference(ids, rendered, cut=len(ids) >= LIMIT, bos=bos)
            if differs is not None:
                differing.append((probe, differs))
    except UnsupportedError:
        return _lengths(asked, chats)
    except ServerError as error:
        return _refused(error)
    measured: dict[str, float | str] = {"conversations": len(chats), "differing": len(differing)}
    if not differing:
        return Row(name, "ok", f"{len(chats)} conversations, the same tokens", measured)
    probe, first = differing[0]
    text = (
        f"{len(differing)} of {len(chats)} conversations differ; number {probe.number} at token "
        f"{first.position}: {_shown(asked, first)}"
    )
    causes = _template_causes(asked, differing)
    return Row(name, "fault", text, measured | first.details(), causes)


def tokens(asked: Asked) -> Row:
    """Compare the server's tokens of the public texts with the training's."""
    name, server = "tokens", asked.server
    texts = [
        probe
        for probe in asked.reference.tokenised
        if probe.kind in ("text", "prompt") and probe.text is not None
    ]
    if not texts:
        return Row(name, "unknown", "the reference has no texts; a witness has them")
    bos = _bos(asked)
    for probe in texts:
        split = server.tokenize(asked.model, probe.text or "")
        differs = difference(probe.ids, split, cut=len(probe.ids) >= LIMIT, bos=bos)
        if differs is not None:
            text = (
                f"{probe.kind} {probe.number} differs at token {differs.position}: "
                f"{_shown(asked, differs)}"
            )
            code = differs.kind if differs.kind.startswith("bos-") else "tokenizer"
            return Row(name, "fault", text, differs.details(), (_cause(code),))
    measured = {"texts": len(texts)}
    if reason := _misread(asked):
        return Row(name, "fault", reason, measured, (_cause("tokenizer-misread"),))
    return Row(name, "ok", f"{len(texts)} texts, the same tokens", measured)


def difference(
    trained: Sequence[int], served: Sequence[int], *, cut: bool = False, bos: int | None = None
) -> Difference | None:
    """Return the first difference; None if there is none.

    `cut` says that `trained` is only the beginning of a longer sequence.
    """
    trained, served = tuple(trained), tuple(served)
    if trained == (served[: len(trained)] if cut else served):
        return None
    pairs = zip(trained, served, strict=False)
    position = next((at for at, (t, s) in enumerate(pairs) if t != s), None)
    at = min(len(trained), len(served)) if position is None else position
    kind = _kind(trained, served, at, cut, bos)
    window = slice(at, at + _WINDOW)
    return Difference(kind, at, trained[window], served[window])


def _kind(
    trained: tuple[int, ...], served: tuple[int, ...], at: int, cut: bool, bos: int | None
) -> str:
    if served[:1] and _same(trained, served[1:], cut):
        if served[:1] == trained[:1] and bos in (None, served[0]):
            return "bos-twice"
        if bos in (None, served[0]):
            return "bos-added"
    if trained[:1] and bos in (None, trained[0]) and _same(trained[1:], served, cut):
        return "bos-missing"
    if at == len(served):
        return "generation-prompt-missing"
    if at == len(trained):
        return "generation-prompt-longer"
    for count in range(1, max(len(trained), len(served))):
        if _overlap(trained[at:], served[at + count :], cut):
            return "inserted"
        if _overlap(trained[at + count :], served[at:], cut):
            return "removed"
    return "other"


def _same(trained: tuple[int, ...], served: tuple[int, ...], cut: bool) -> bool:
    size = min(len(trained), len(served)) if cut else max(len(trained), len(served))
    return size > 0 and trained[:size] == served[:size]


def _overlap(trained: tuple[int, ...], served: tuple[int, ...], cut: bool) -> bool:
    """Return True if both go on alike to their ends, or to where `trained` was cut."""
    size = min(len(trained), len(served))
    return size >= (_FEWEST_CUT if cut else _FEWEST) and _same(trained, served, cut)


def _ids(asked: Asked, probe: Probe) -> tuple[int, ...]:
    """Return the ids of a conversation; by the server's tokenizer if only its text is known."""
    return probe.ids or asked.server.tokenize(asked.model, probe.text or "", special=False)


def _lengths(asked: Asked, chats: Sequence[Probe]) -> Row:
    """Compare numbers of tokens, where a server tells no ids: a difference is a fault."""
    for probe in chats:
        ids = _ids(asked, probe)
        try:
            length = asked.server.generate(asked.model, probe.messages or (), 1)[0].prompt_length
        except ServerError as error:
            return _refused(error)
        if length is None:
            reason = "the server does not tell the tokens of a conversation"
            return Row("template", "unknown", reason)
        if length < len(ids) or (length > len(ids) and len(ids) < LIMIT):
            text = (
                f"conversation {probe.number} has {length} tokens, and had {len(ids)} in training"
            )
            measured = {"served": float(length), "trained": float(len(ids))}
            return Row("template", "fault", text, measured, (_cause("template"),))
    reason = f"{len(chats)} conversations have as many tokens as in training; not told which"
    return Row("template", "unknown", reason)


def _refused(error: ServerError) -> Row:
    if error.code != "request" or isinstance(error, UnsupportedError):
        raise error
    reason = f"the server refuses a conversation: {error.message}"
    return Row("template", "fault", reason, causes=(_cause("template"),))


def _template_causes(
    asked: Asked, differing: Sequence[tuple[Probe, Difference]]
) -> tuple[Cause, ...]:
    if _has_other_tokenizer(asked):
        return (_cause("tokenizer"),)
    kinds = {differs.kind for _, differs in differing}
    if all((probe.messages or ({},))[0].get("role") != "system" for probe, _ in differing):
        if kinds == {"inserted"}:
            return (_cause("system-prompt-added"),)
        if kinds == {"removed"}:
            return (_cause("system-prompt-missing"),)
    return tuple(_cause(kind) for kind in sorted(kinds) if kind in _CAUSES) or (_cause("template"),)


def _has_other_tokenizer(asked: Asked) -> bool:
    try:
        return any(cause.code == "tokenizer" for cause in tokens(asked).causes)
    except UnsupportedError:
        return False


def _misread(asked: Asked) -> str:
    """Return how the server's ids differ from tokenizer.json, which training may have misread."""
    path = asked.reference.folder / "tokenizer.json"
    if not path.is_file() or find_spec("tokenizers") is None:
        return ""
    from tokenizers import Tokenizer

    texts: Sequence[str] = prove_ids.TEXTS
    if asked.server.kind == "llama.cpp":  # GGUF has no normaliser
        texts = [normalize("NFC", text) for text in texts]
    reason = prove_ids.difference(
        prove_ids.plain_encoder(Tokenizer.from_file(str(path))),
        lambda text: asked.server.tokenize(asked.model, text, special=False),
        texts,
    )
    return f"by the server {reason}" if reason else ""


def _bos(asked: Asked) -> int | None:
    facts = asked.reference.facts.get("tokens") or {}
    value = (facts.get("tokenizer") or {}).get("bos_token_id")
    return value if isinstance(value, int) else None


def _shown(asked: Asked, differs: Difference) -> str:
    """Return both sides around a difference, as text where the reference has a tokenizer."""
    sides = [("training", differs.trained), ("server", differs.served)]
    path = asked.reference.folder / "tokenizer.json"
    if path.is_file() and find_spec("tokenizers") is not None:
        return ", ".join(f"{side} {_text(path, ids)!r}" for side, ids in sides)
    return ", ".join(f"{side} {list(ids)}" for side, ids in sides)


def _text(path: Path, ids: Sequence[int]) -> str:
    from tokenizers import Tokenizer

    decoded: str = Tokenizer.from_file(str(path)).decode(list(ids), skip_special_tokens=False)
    return decoded


def _cause(code: str) -> Cause:
    return Cause(code, *_CAUSES[code])


_TEMPLATE = "vllm serve --chat-template <chat_template.jinja of the training>"
_CAUSES = {
    "tokenizer": (
        "the server has the tokenizer of another model",
        "vllm serve --tokenizer <the folder of the training's tokenizer>",
    ),
    "tokenizer-misread": (
        "the server's tokenizer class does not read tokenizer.json as it is",
        "set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json of the served "
        "folder",
    ),
    "template": ("the server renders conversations with another chat template", _TEMPLATE),
    "bos-twice": (
        "BOS comes twice: the template has it, and the tokenizer adds it again",
        "remove bos_token from the chat template, or set add_bos_token=false in "
        "tokenizer_config.json",
    ),
    "bos-added": (
        "the server begins with BOS, the training did not",
        "set add_bos_token=false in tokenizer_config.json of the served folder",
    ),
    "bos-missing": (
        "the training began with BOS, the server does not",
        "set add_bos_token=true in tokenizer_config.json of the served folder",
    ),
    "system-prompt-added": (
        "the server adds a default system prompt",
        "serve the training's chat template, or send the same system prompt in training",
    ),
    "system-prompt-missing": (
        "the training had a default system prompt, the server has none",
        _TEMPLATE,
    ),
    "generation-prompt-missing": (
        "the server ends the prompt without the beginning of the assistant's turn",
        "send add_generation_prompt=true, or serve the training's chat template",
    ),
    "generation-prompt-longer": (
        "the server's prompt goes on where the training's ended, e.g. with <think>",
        "serve the training's chat template; check --default-chat-template-kwargs",
    ),
}
"""Text and hint by code."""
