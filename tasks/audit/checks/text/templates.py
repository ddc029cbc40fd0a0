"""Check chat templates: they exist, agree, parse, end, and use tokens that the tokenizer has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.audit.catalogue.text import Templates
from tasks.audit.checks.text.template_text import BrokenTemplateError, read_template
from tasks.audit.checks.text.tokens import SETTINGS, TOKENIZERS, Tokens, read_tokens
from tasks.audit.finding import Finding, Severity
from tasks.audit.recognise import Kind
from tasks.audit.source import Source
from tasks.weights.tokens.render_template import (
    SECONDS,
    TemplateError,
    TemplateLimitError,
    after_answer,
)

JINJA = "chat_template.jinja"
_DOCUMENTS = (SETTINGS, "chat_template.json", "processor_config.json")
_DEFAULT = "default"
MARK = "\ufeff"


def check(source: Source) -> Iterator[Finding]:
    """Check every file from which a loader reads templates."""
    if not (source.is_adapter or source.kind in (Kind.MODEL, Kind.VALUE)):
        return
    places = template_places(source)
    has_tokenizer = any(name in source.folder.files for name in TOKENIZERS)
    if not places and has_tokenizer:
        yield Templates.TEMPLATE_MISSING.at("", found="no chat template", expected=JINJA)
    yield from _agree(places)
    for place, text in places.items():
        if MARK in text:
            where = f"U+FEFF at character {text.index(MARK)}"
            yield Templates.TEMPLATE_MARK.at(place, found=where, expected="no mark")
    tokens = read_tokens(source.folder)
    for place, text in places.items():
        yield from _text(place, text, tokens)
    if source.base is not None and places:
        theirs = set(template_places(source.base).values())
        if theirs and not theirs & set(places.values()):
            yield Templates.TEMPLATE_NOT_OF_BASE.at(
                next(iter(places)), found="another template", expected="the base's, unless intended"
            )


def template_places(source: Source) -> dict[str, str]:
    """Return the default template by the file that holds it, without empty ones."""
    texts = {JINJA: source.folder.text(JINJA)}
    for name in _DOCUMENTS:
        texts[name] = _default(source.config(name).get("chat_template"))
    return {name: text.strip("\n") for name, text in texts.items() if text.strip()}


def _default(value: object) -> str:
    """Return the default template of `chat_template`: a text, a mapping, or a list of pairs."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        text = value.get(_DEFAULT)
        return text if isinstance(text, str) else ""
    if isinstance(value, list):
        named = [
            pair for pair in value if isinstance(pair, Mapping) and pair.get("name") == _DEFAULT
        ]
        text = named[0].get("template") if named else None
        return text if isinstance(text, str) else ""
    return ""


def _agree(places: Mapping[str, str]) -> Iterator[Finding]:
    first = next(iter(places), "")
    for place, text in places.items():
        if text != places[first]:
            # Processors of published models have their own templates, for images.
            yield Templates.TEMPLATES_DIFFER.at(
                place, found=f"another template than in {first}", expected="the same in both",
                severity=None if place == SETTINGS else Severity.WARNING,
            )  # fmt: skip


def _text(place: str, text: str, tokens: Tokens) -> Iterator[Finding]:
    try:
        words = read_template(text, tokens.special)
    except BrokenTemplateError as error:
        yield Templates.TEMPLATE_BROKEN.at(
            place, found=str(error), expected="a template that parses"
        )
        return
    try:
        after_answer(text, {"bos_token": "", "eos_token": ""})
    except TemplateLimitError as error:
        yield Templates.TEMPLATE_UNBOUNDED.at(
            place, found=str(error), expected=f"rendered within {SECONDS} s"
        )
    except TemplateError:
        pass  # it may refuse two messages, or need values that only a request has
    unknown = sorted(marker for marker in words.markers if not tokens.has(marker))
    if tokens.rows and unknown:
        yield Templates.TEMPLATE_UNKNOWN_TOKENS.at(
            place, unknown, found="not tokens of the tokenizer", expected="tokens"
        )
