"""Chat templates: they exist, agree, parse, and use tokens that the tokenizer has."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tasks.audit.check import BASE, ERROR, INFO, WARNING, Fault, check
from tasks.audit.repair import SETTINGS, TOKENIZER, Draft
from tasks.audit.source import Kind, Source
from tasks.weights.tokens.render_template import template_environment

JINJA = "chat_template.jinja"
_PROCESSORS = ("chat_template.json", "processor_config.json")
_DOCUMENTS = (SETTINGS, *_PROCESSORS)
_DEFAULT = "default"
_MARK = "\ufeff"


def writes_chats(source: Source) -> bool:
    """Return True for an adapter or a model that writes text."""
    return source.is_adapter or source.kind in (Kind.MODEL, Kind.VALUE)


def template_places(source: Source) -> dict[str, str]:
    """Return the default template by the file that holds it, without empty ones."""
    texts = {JINJA: source.folder.text(JINJA)}
    for name in _DOCUMENTS:
        texts[name] = _default(source.config(name).get("chat_template"))
    return {name: text.strip("\n") for name, text in texts.items() if text.strip()}


def _default(value: object) -> str:
    """Return the default template of `chat_template`: a text, a mapping, or a list of pairs."""
    if isinstance(value, Mapping):
        value = value.get(_DEFAULT)
    elif isinstance(value, list):
        named = [pair for pair in value if isinstance(pair, Mapping)]
        value = next((p.get("template") for p in named if p.get("name") == _DEFAULT), None)
    return value if isinstance(value, str) else ""


def turn_ends(
    source: Source, ids: Mapping[str, int], special: Collection[str], eos: int | None
) -> list[int]:
    """Return the ids of the tokens with which the chat template ends a message."""
    text = next(iter(source.once(template_places).values()), "")
    try:
        ends = read_template(text, special).ends
    except BrokenTemplateError:
        return []  # TEMPLATE_BROKEN
    numbers = [eos if end == EOS else ids.get(end) for end in sorted(ends)]
    return [number for number in numbers if number is not None]


@check(
    "TEMPLATE_MISSING", INFO, needs=(writes_chats,),
    why="vLLM's chat endpoint and apply_chat_template refuse: 'default chat template is no longer "
    "allowed'; a template chosen by hand may differ from that of training",
    fix="save the template of the training run as chat_template.jinja",
    issues="LLaMA-Factory #10396, OpenRLHF #1069",
)  # fmt: skip
def template_missing(source: Source) -> Iterator[Fault]:
    """No chat template; a warning if the base has one."""
    if not source.once(template_places) and TOKENIZER in source.folder.files:
        lost = source.base is not None and bool(template_places(source.base))
        yield Fault("no chat template", JINJA, severity=WARNING if lost else None)


@check(
    "TEMPLATES_DIFFER", ERROR, needs=(writes_chats,),
    why="transformers, processors and vLLM read different files: one chat becomes different tokens",
    fix="keep only the template of training, in chat_template.jinja",
    issues="LLaMA-Factory #5489, OpenRLHF #1069",
)  # fmt: skip
def templates_differ(source: Source) -> Iterator[Fault]:
    """Different chat templates in one folder."""
    places = source.once(template_places)
    first = next(iter(places), "")
    for place, text in places.items():
        if text != places[first]:
            # Processors of published models have their own templates, for images.
            severity = WARNING if place in _PROCESSORS else None
            text = f"another template than in {first}"
            yield Fault(text, "the same in both", file=place, severity=severity)


@check(
    "TEMPLATE_MARK", ERROR, needs=(writes_chats,),
    why="every prompt has U+FEFF, mostly at its beginning, which no training prompt had",
    fix="save the template without it: {repair}",
)  # fmt: skip
def template_mark(source: Source) -> Iterator[Fault]:
    """A chat template with a byte-order mark."""
    for place, text in source.once(template_places).items():
        if _MARK in text:
            where = f"U+FEFF at character {text.index(_MARK)}"
            yield Fault(where, "no mark", file=place, repair=_remove_marks)


def _remove_marks(draft: Draft) -> None:
    """Remove byte-order marks from all chat templates."""
    places = template_places(draft.source).items()
    for name in [name for name, text in places if _MARK in text and name not in draft.documents]:
        if name == JINJA:
            draft.documents[name] = draft.source.folder.text(name).replace(_MARK, "")
        else:
            written = json.dumps(draft.source.config(name)["chat_template"], ensure_ascii=False)
            draft.edit(name, chat_template=json.loads(written.replace(_MARK, "")))
        draft.done.append(f"{name}: the chat template without U+FEFF")


@check(
    "TEMPLATE_BROKEN", ERROR, needs=(writes_chats,),
    why="every chat request fails with a TemplateSyntaxError",
    fix="save the template of the training run again",
)  # fmt: skip
def template_broken(source: Source) -> Iterator[Fault]:
    """A chat template that does not parse."""
    for place, text in source.once(template_places).items():
        try:
            read_template(text, ())
        except BrokenTemplateError as error:
            yield Fault(str(error), "a template that parses", file=place)


@check(
    "TEMPLATE_NOT_OF_BASE", INFO, needs=(writes_chats, BASE),
    why="intended if training had its own template; otherwise the reason why an API that uses the "
    "base's template gives better responses than the merged model",
    fix="compare it with the template of the training run",
    issues="LLaMA-Factory #10596, OpenRLHF #1069",
)  # fmt: skip
def template_not_of_base(source: Source) -> Iterator[Fault]:
    """Another chat template than the base's."""
    places = source.once(template_places)
    theirs = set(template_places(source.base).values()) if source.base is not None else set()
    if places and theirs and not theirs & set(places.values()):
        yield Fault("another template", "the base's, unless intended", file=next(iter(places)))


MAX_BYTES = 256 << 10
"""The longest published templates, of models with tools, have about 30 kB."""
_MARKER = re.compile(r"<\|[^\s|<>{}'\"]{1,40}\|>|<(?:start|end)_of_turn>")
EOS = "eos_token"


class BrokenTemplateError(ValueError):
    """The template does not parse; the message says where."""


@dataclass(frozen=True)
class TemplateText:
    """The literal text of a template.

    Attributes:
        markers: texts that look like special tokens, e.g. `<|im_end|>`.
        ends: special tokens directly after a message's content; `EOS` is the tokenizer's own.
    """

    markers: frozenset[str]
    ends: frozenset[str]


def read_template(template: str, special: Collection[str]) -> TemplateText:
    """Parse a template, without rendering it: an untrusted one can run for ever.

    Raises:
        BrokenTemplateError: it does not parse, or is too long.
    """
    if len(template) > MAX_BYTES:
        raise BrokenTemplateError(f"{len(template)} characters, at most {MAX_BYTES} are read")
    pieces = list(_pieces(_parse(template)))
    texts = [text for kind, text in pieces if kind == "text"]
    markers = frozenset(marker for text in texts for marker in _MARKER.findall(text))
    return TemplateText(markers, frozenset(_ends(pieces, special)))


def _parse(template: str) -> Any:
    from jinja2 import TemplateError

    try:
        return template_environment().parse(template)
    except (TemplateError, RecursionError, ValueError) as error:
        raise BrokenTemplateError(str(error) or type(error).__name__) from error


def _pieces(node: Any) -> Iterator[tuple[str, str]]:
    """Yield the output in source order: ("text", literal) or ("value", names in it)."""
    from jinja2 import nodes

    try:
        for output in node.find_all((nodes.Output, nodes.Assign)):
            children = output.nodes if isinstance(output, nodes.Output) else [output.node]
            for child in children:
                yield from _flat(child)
    except RecursionError as error:
        raise BrokenTemplateError("nested too deep") from error


def _flat(node: Any) -> Iterator[tuple[str, str]]:
    """Yield the pieces of one expression."""
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        yield "text", node.data
    elif isinstance(node, nodes.Const):
        if isinstance(node.value, str):
            yield "text", node.value
    elif isinstance(node, nodes.Add):
        yield from _flat(node.left)
        yield from _flat(node.right)
    elif isinstance(node, nodes.CondExpr):
        yield from _flat(node.expr1)
        if node.expr2 is not None:
            yield from _flat(node.expr2)
    elif isinstance(node, nodes.Concat):
        for part in node.nodes:
            yield from _flat(part)
    else:
        named = [part.name for part in node.find_all(nodes.Name)]
        named += [node.name] if isinstance(node, nodes.Name) else []
        named += [part.attr for part in node.find_all(nodes.Getattr)]
        named += [node.attr] if isinstance(node, nodes.Getattr) else []
        keys = [part.value for part in node.find_all(nodes.Const) if isinstance(part.value, str)]
        yield "value", " ".join([*named, *keys])


def _ends(pieces: list[tuple[str, str]], special: Collection[str]) -> Iterator[str]:
    """Yield special tokens that follow a message's content."""
    for (kind, value), (next_kind, following) in pairwise(pieces):
        if kind != "value" or "content" not in value:
            continue
        if next_kind == "value" and EOS in following.split():
            yield EOS
        starts = [token for token in special if following.lstrip().startswith(token)]
        if next_kind == "text" and starts:
            yield max(starts, key=len)
