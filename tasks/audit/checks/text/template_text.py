"""Read the literal text of a chat template from its syntax tree, without rendering it.

Templates come with a model and are programs; rendering an untrusted one can run for ever.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tasks.weights.tokens.render_template import template_environment

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
        ends: special tokens directly after a message's content; `EOS` stands for the tokenizer's
            own.
    """

    markers: frozenset[str]
    ends: frozenset[str]


def read_template(template: str, special: Collection[str]) -> TemplateText:
    """Parse a template.

    Args:
        template: source text of the template.
        special: special tokens of the tokenizer.

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
