"""Read a tokenizer folder: number of ids, EOS and padding ids, chat template.

Reads the files themselves (`tokenizer.json`, `tokenizer_config.json`, the chat template), which
takes milliseconds and needs no model library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tasks.core.errors import ArtifactError
from tasks.weights.files.reader import read_json

_ANSWER = "plumbline-answer-text"
_ANY = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that the code of a chat template may raise."""


@dataclass(frozen=True)
class TokenizerFacts:
    """Ids and template of a tokenizer.

    Attributes:
        rows: highest id + 1: the smallest number of rows of a fitting embedding.
        eos: id of the tokenizer's EOS token.
        pad: id of its padding token; None if it has none.
        end_of_turn: id of the special token that the chat template writes after a response; None
            if it writes no special token there.
        template: the chat template; "" if there is none.
    """

    rows: int
    eos: int
    pad: int | None
    end_of_turn: int | None
    template: str

    @property
    def stops(self) -> list[int]:
        """Ids that end a response, the tokenizer's EOS first."""
        ids = [self.eos, self.end_of_turn]
        return list(dict.fromkeys(token for token in ids if token is not None))


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Read a tokenizer folder.

    Raises:
        ArtifactError: no tokenizer.json, no EOS token, a special token without an id, or a chat
            template that does not render.
    """
    document = read_json(folder / "tokenizer.json")
    settings = read_json(folder / "tokenizer_config.json")
    added = _added(document)
    eos = _token_id(folder, settings, document, "eos_token")
    if eos is None:
        raise ArtifactError(f"{folder}: the tokenizer names no eos_token")
    template = _template(folder, settings)
    special = [str(t["content"]) for t in document.get("added_tokens", []) if t.get("special")]
    ending = _after_answer(folder, template, settings) if template else ""
    turn = [token for token in special if ending.startswith(token)]
    return TokenizerFacts(
        rows=_highest_id(folder, document) + 1,
        eos=eos,
        pad=_token_id(folder, settings, document, "pad_token"),
        end_of_turn=added[max(turn, key=len)] if turn else None,
        template=template,
    )


def token_ids(folder: Path) -> tuple[dict[str, tuple[str, int]], int]:
    """Return text and id of the special tokens by role, and the highest id of the tokenizer.

    Raises:
        ArtifactError: a file cannot be read, or a special token has no id.
    """
    document = read_json(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    special = {}
    for role in ("pad_token", "eos_token", "bos_token", "unk_token"):
        token = _token_id(folder, settings, document, role)
        if token is not None:
            special[role] = (str(_text(settings.get(role))), token)
    return special, _highest_id(folder, document)


def _added(document: Mapping[str, Any]) -> dict[str, int]:
    return {str(t["content"]): int(t["id"]) for t in document.get("added_tokens", [])}


def _highest_id(folder: Path, document: Mapping[str, Any]) -> int:
    vocabulary = (document.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict | list):
        raise ArtifactError(f"{folder}/tokenizer.json: no vocabulary")
    # Unigram models have a list of (piece, score).
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max(map(int, [*ids, *_added(document).values()]))


def _token_id(
    folder: Path, settings: Mapping[str, Any], document: Mapping[str, Any], role: str
) -> int | None:
    token = _text(settings.get(role))
    if token is None:
        return None
    vocabulary = (document.get("model") or {}).get("vocab")
    plain = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    token_id = _added(document).get(token, plain)
    if token_id is None:
        raise ArtifactError(f"{folder}: {role} {token!r} has no id in tokenizer.json")
    return int(token_id)


def _text(token: Any) -> str | None:
    # A special token is stored as a string, or as an object with the token's properties.
    return token.get("content") if isinstance(token, dict) else token


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    inline = settings.get("chat_template") or ""
    if isinstance(inline, list):  # several templates, each with a name
        inline = {named["name"]: named["template"] for named in inline}.get("default", "")
    return str(inline)


def template_environment() -> Any:
    """Return the jinja2 environment that renders chat templates as transformers does.

    It is sandboxed: a template comes with a model and is not trusted.
    """
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Render `{% generation %}`, which marks responses for loss masks, as its contents."""

        tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )


def _after_answer(folder: Path, template: str, settings: Mapping[str, Any]) -> str:
    """Return the text that the template writes after an assistant's response."""
    from jinja2 import TemplateError

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = template_environment()
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "2000-01-01"}
    names = {role: _text(settings.get(role)) or "" for role in ("bos_token", "eos_token")}
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = environment.from_string(template).render(
            messages=messages, add_generation_prompt=False, **names
        )
    except (TemplateError, *_ANY) as error:
        raise ArtifactError(f"{folder}: the chat template does not render: {error}") from error
    _, answer, ending = text.rpartition(_ANSWER)
    if not answer:
        raise ArtifactError(f"{folder}: the chat template drops the assistant's answer")
    return ending.strip()
