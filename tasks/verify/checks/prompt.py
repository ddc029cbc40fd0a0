"""Compare the server's prompts with those of the training.

template    conversations as the server's own chat template renders them
tokens      texts as the server's tokeniser splits them, and back
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tasks.core.terminal import plain
from tasks.verify.answers import Answers
from tasks.verify.check import Cause, Check
from tasks.verify.checks.differences import Difference, difference
from tasks.verify.reference import Probe, Reference
from tasks.verify.servers.server import Server, ServerError, UnsupportedError
from tasks.weights.tokens import prove_ids
from tasks.witness.plumbline_witness.probes import LIMIT


def template(answers: Answers, model: str, base: str | None) -> Check:
    """Compare the server's rendering of the public conversations with the training's."""
    server, reference = answers.server, answers.reference
    chats = [probe for probe in reference.tokenised if probe.messages]
    if not chats:
        return Check("template", "unknown", "the reference has no conversations")
    if not server.abilities.render:
        return _lengths(server, model, chats)
    bos = _special(reference, "bos_token_id")
    differing: list[tuple[Probe, Difference]] = []
    for probe in chats:
        rendered = server.render(model, probe.messages or (), probe.tools)
        ids = _ids(server, model, probe)
        differs = difference(ids, rendered, cut=len(ids) >= LIMIT, bos=bos)
        if differs is not None:
            differing.append((probe, differs))
    measured: dict[str, float | str] = {"conversations": len(chats), "differing": len(differing)}
    if not differing:
        return Check("template", "ok", f"{len(chats)} conversations, the same tokens", measured)
    probe, first = differing[0]
    measured |= {"position": first.position, "trained": str(first.trained)}
    measured |= {"served": str(first.served)}
    text = (
        f"{len(differing)} of {len(chats)} conversations differ; number {probe.number} at token "
        f"{first.position}: {_shown(server, model, first)}"
    )
    causes = {cause.code: cause for cause in _template_causes(answers, model, differing)}
    return Check("template", "fault", text, measured, causes=tuple(causes.values()))


def _ids(server: Server, model: str, probe: Probe) -> tuple[int, ...]:
    """Return the ids of a conversation; by the server's tokenizer if only its text is known."""
    return probe.ids or server.tokenize(model, probe.text or "", special=False)


def _template_causes(
    answers: Answers, model: str, differing: Sequence[tuple[Probe, Difference]]
) -> list[Cause]:
    if _other_tokenizer(answers, model):
        return [_TOKENIZER]
    without_system = [p for p, _ in differing if (p.messages or ({},))[0].get("role") != "system"]
    kinds = {differs.kind for _, differs in differing}
    if len(without_system) == len(differing) and kinds == {"inserted"}:
        return [_CAUSES["system-prompt-added"]]
    if len(without_system) == len(differing) and kinds == {"removed"}:
        return [_CAUSES["system-prompt-missing"]]
    named = [_CAUSES[kind] for kind in sorted(kinds) if kind in _CAUSES]
    return named or [_CAUSES["template"]]


def _lengths(server: Server, model: str, chats: Sequence[Probe]) -> Check:
    """Compare numbers of tokens, where a server tells no ids: a difference is a fault."""
    for probe in chats:
        ids = _ids(server, model, probe)
        try:
            length = server.generate(model, probe.messages or (), 1)[0].prompt_length
        except UnsupportedError:
            length = None
        except ServerError as error:
            if error.code != "request":
                raise
            reason = f"the server refuses a conversation: {error.message}"
            return Check("template", "fault", reason, causes=(_CAUSES["template"],))
        if length is None:
            reason = "the server does not tell the tokens of a conversation"
            return Check("template", "unknown", reason)
        if length < len(ids) or (length > len(ids) and len(ids) < LIMIT):
            text = (
                f"conversation {probe.number} has {length} tokens, and had {len(ids)} in training"
            )
            measured = {"served": float(length), "trained": float(len(ids))}
            return Check("template", "fault", text, measured, causes=(_CAUSES["template"],))
    return Check(
        "template", "unknown",
        f"{len(chats)} conversations have as many tokens as in training; the server does not tell "
        "which",
    )  # fmt: skip


def tokens(answers: Answers, model: str, base: str | None) -> Check:
    """Compare the server's tokens of the public texts with the training's.

    `unchanged` is the number of texts that come back as they were. Tokenisers with unknown tokens
    return others, so that this is no fault.
    """
    server, reference = answers.server, answers.reference
    kinds = ("text", "prompt")
    texts = [p for p in reference.tokenised if p.kind in kinds and p.text is not None]
    if not texts:
        return Check("tokens", "unknown", "the reference has no texts; a witness has them")
    bos, unchanged = _special(reference, "bos_token_id"), 0
    for probe in texts:
        text = probe.text or ""
        split = server.tokenize(model, text)
        differs = difference(probe.ids, split, cut=len(probe.ids) >= LIMIT, bos=bos)
        if differs is not None:
            cause = _CAUSES[differs.kind] if differs.kind.startswith("bos-") else _TOKENIZER
            return Check(
                "tokens", "fault",
                f"{probe.kind} {probe.number} differs at token {differs.position}: "
                f"{_shown(server, model, differs)}",
                {"position": differs.position, "trained": str(differs.trained),
                 "served": str(differs.served)},
                causes=(cause,),
            )  # fmt: skip
        try:
            unchanged += text in server.detokenize(model, split)
        except UnsupportedError:
            continue
    measured = {"texts": len(texts), "unchanged": unchanged}
    if reason := _misread(server, model, reference.folder):
        return Check("tokens", "fault", reason, measured, causes=(_MISREAD,))
    return Check("tokens", "ok", f"{len(texts)} texts, the same tokens", measured)


def _misread(server: Server, model: str, folder: Path) -> str:
    """Return how the server's ids differ from tokenizer.json, which training may have misread."""
    path = folder / "tokenizer.json"
    if not path.is_file() or find_spec("tokenizers") is None:
        return ""
    from tokenizers import Tokenizer

    truth = prove_ids.plain_encoder(Tokenizer.from_file(str(path)))
    reason = prove_ids.difference(
        truth, lambda text: server.tokenize(model, text, special=False), prove_ids.TEXTS
    )
    return f"by the server {reason}" if reason else ""


def _special(reference: Reference, name: str) -> int | None:
    facts = reference.facts.get("tokens") or {}
    value = (facts.get("tokenizer") or {}).get(name)
    return value if isinstance(value, int) else None


def _other_tokenizer(answers: Answers, model: str) -> bool:
    try:
        check = tokens(answers, model, None)
    except UnsupportedError:
        return False
    return _TOKENIZER in check.causes


def _shown(server: Server, model: str, differs: Difference) -> str:
    """Return both sides around a difference, as text where the server tells it."""
    try:
        trained = plain(server.detokenize(model, differs.trained))
        served = plain(server.detokenize(model, differs.served))
    except (UnsupportedError, ServerError):
        return f"training {list(differs.trained)}, server {list(differs.served)}"
    return f"training {trained!r}, server {served!r}"


_TOKENIZER = Cause(
    "tokenizer",
    "the server has the tokenizer of another model",
    "vllm serve --tokenizer <the folder of the training's tokenizer>",
)
_MISREAD = Cause(
    "tokenizer-misread",
    "the server's tokenizer class does not read tokenizer.json as it is",
    "set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json of the served folder",
)
_CAUSES = {
    cause.code: cause
    for cause in (
        Cause(
            "template",
            "the server renders conversations with another chat template",
            "vllm serve --chat-template <chat_template.jinja of the training>",
        ),
        Cause(
            "bos-twice",
            "BOS comes twice: the template has it, and the tokenizer adds it again",
            "remove bos_token from the chat template, or set add_bos_token=false in "
            "tokenizer_config.json",
        ),
        Cause(
            "bos-added",
            "the server begins with BOS, the training did not",
            "set add_bos_token=false in tokenizer_config.json of the served folder",
        ),
        Cause(
            "bos-missing",
            "the training began with BOS, the server does not",
            "set add_bos_token=true in tokenizer_config.json of the served folder",
        ),
        Cause(
            "system-prompt-added",
            "the server adds a default system prompt",
            "serve the training's chat template, or send the same system prompt in training",
        ),
        Cause(
            "system-prompt-missing",
            "the training had a default system prompt, the server has none",
            "vllm serve --chat-template <chat_template.jinja of the training>",
        ),
        Cause(
            "generation-prompt-missing",
            "the server ends the prompt without the beginning of the assistant's turn",
            "send add_generation_prompt=true, or serve the training's chat template",
        ),
        Cause(
            "generation-prompt-longer",
            "the server's prompt goes on where the training's ended, e.g. with <think>",
            "serve the training's chat template; check --default-chat-template-kwargs",
        ),
    )
}
