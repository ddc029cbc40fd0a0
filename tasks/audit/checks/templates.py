"""Chat templates: they agree, parse, and end messages with tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check
from tasks.audit.known import PROCESSOR_TEMPLATES, template_places, writes_chats
from tasks.audit.source import Source
from tasks.weights.tokens.render_template import template_environment


def turn_ends(
    source: Source, ids: Mapping[str, int], special: Collection[str], eos: int | None
) -> list[int]:
    """Return the ids of the tokens with which the chat template ends a message."""
    text = next(iter(source.once(template_places).values()), "")
    try:
        ends = read_template(text, special).ends
    except BrokenTemplateError:
        return []  # TEMPLATES_DIFFER
    numbers = [eos if end == EOS else ids.get(end) for end in sorted(ends)]
    return [number for number in numbers if number is not None]


@check(
    "TEMPLATES_DIFFER", ERROR, needs=(writes_chats,),
    why="transformers, processors and vLLM read different files: other tokens for one chat",
    fix="keep only the template of training, in chat_template.jinja",
    issues="LLaMA-Factory #5489, OpenRLHF #1069, LLaMA-Factory #10596",
)  # fmt: skip
def templates_differ(source: Source) -> Iterator[Fault]:
    """Chat templates that differ or do not parse; an info if the template is not the base's."""
    places = source.once(template_places)
    first = next(iter(places), "")
    for place, text in places.items():
        if text != places[first]:
            # Processors of published models have their own templates, for images.
            severity = WARNING if place in PROCESSOR_TEMPLATES else None
            yield Fault(f"another template than in {first}", "the same", place, severity=severity)
        try:
            read_template(text, ())
        except BrokenTemplateError as error:
            why = "every chat request fails with a TemplateSyntaxError"
            fix = "save the template of the training run again"
            yield Fault(str(error), "a template that parses", place, why=why, fix=fix)
    theirs = set(template_places(source.base).values()) if source.base is not None else set()
    if places and theirs and not theirs & set(places.values()):
        why = "intended if training had its own; else it is the reason of other responses"
        fix = "compare it with the template of the training run"
        yield Fault("not the base's", "the base's, unless intended", first, (), INFO, why, fix)


MAX_BYTES = 256 << 10
"""The longest published templates, of models with tools, have about 30 kB."""
_MARKER = re.compile(r"<\|[^\s|<>{}'\"]{1,40}\|>|<(?:start|end)_of_turn>")
EOS = "eos_token"


class BrokenTemplateError(ValueError):
    """The template does not parse; the message says where."""


@dataclass(frozen=True)
class TemplateText:
    """The literal text of a template."""

    markers: frozenset[str]  # texts that look like special tokens, e.g. `<|im_end|>`
    # special tokens directly after a message's content; `EOS` is the tokenizer's own
    ends: frozenset[str]


def read_template(template: str, special: Collection[str]) -> TemplateText:
    """Parse a template, without rendering it: an untrusted one can run for ever.

    Raises:
        BrokenTemplateError: it does not parse, or is too long.
    """
    from jinja2 import TemplateError

    if len(template) > MAX_BYTES:
        raise BrokenTemplateError(f"{len(template)} characters, at most {MAX_BYTES} are read")
    try:
        tree = template_environment().parse(template)
    except (TemplateError, RecursionError, ValueError) as error:
        raise BrokenTemplateError(str(error) or type(error).__name__) from error
    pieces = list(_pieces(tree))
    texts = [text for kind, text in pieces if kind == "text"]
    markers = frozenset(marker for text in texts for marker in _MARKER.findall(text))
    return TemplateText(markers, frozenset(_ends(pieces, special)))


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
    elif isinstance(node, nodes.Add | nodes.Concat | nodes.CondExpr):
        for part in node.iter_child_nodes(exclude=("test",)):
            yield from _flat(part)
    else:
        inside = [node, *node.find_all((nodes.Name, nodes.Getattr, nodes.Const))]
        names = [getattr(part, key, "") for part in inside for key in ("name", "attr", "value")]
        yield "value", " ".join(name for name in names if isinstance(name, str))


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
