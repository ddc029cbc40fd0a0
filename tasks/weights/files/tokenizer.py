"""What a tokenizer folder says of ids: how many there are, which of them end a text, which pads.

Read from the files themselves (`tokenizer.json`, `tokenizer_config.json`, the chat template): that
takes milliseconds, and needs no model library.
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
"""What a template's own code may raise: it comes with a model."""


@dataclass(frozen=True)
class TokenizerFacts:
    """Ids and template of a tokenizer.

    Attributes:
        rows: highest id + 1: what an embedding needs to have at least.
        eos: id of the tokenizer's own end-of-text token.
        pad: id of its padding token; None when it has none.
        end_of_turn: id of the special token that the chat template puts after an answer; None
            when it puts no special token there.
        template: the chat template, "" when there is none.
    """

    rows: int
    eos: int
    pad: int | None
    end_of_turn: int | None
    template: str

    @property
    def stops(self) -> list[int]:
        """Every id that ends an answer, the tokenizer's own first."""
        found = [self.eos, self.end_of_turn]
        return list(dict.fromkeys(token for token in found if token is not None))


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Read a tokenizer folder.

    Raises:
        ArtifactError: no tokenizer.json, no EOS token, a token without an id, a broken template.
    """
    document = read_json(folder / "tokenizer.json")
    settings = read_json(folder / "tokenizer_config.json")
    added = {str(t["content"]): int(t["id"]) for t in document.get("added_tokens", [])}
    ids = [*_vocabulary_ids(folder, document), *added.values()]
    eos = _token_id(folder, settings, document, "eos_token", added)
    if eos is None:
        raise ArtifactError(f"{folder}: the tokenizer names no eos_token")
    template = _template(folder, settings)
    special = [str(t["content"]) for t in document.get("added_tokens", []) if t.get("special")]
    ending = _after_answer(folder, template, settings) if template else ""
    turn = [token for token in special if ending.startswith(token)]
    return TokenizerFacts(
        rows=max(ids) + 1,
        eos=eos,
        pad=_token_id(folder, settings, document, "pad_token", added),
        end_of_turn=added[max(turn, key=len)] if turn else None,
        template=template,
    )


def token_ids(folder: Path) -> tuple[dict[str, tuple[str, int]], int]:
    """Text and id of the special tokens by role, the padding token first, and the highest id.

    Raises:
        ArtifactError: files that cannot be read, a special token without an id.
    """
    document = read_json(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    added = {str(t["content"]): int(t["id"]) for t in document.get("added_tokens", [])}
    found = {}
    for role in ("pad_token", "eos_token", "bos_token", "unk_token"):
        token = _token_id(folder, settings, document, role, added)
        if token is not None:
            found[role] = (str(_text(settings.get(role))), token)
    return found, max([*_vocabulary_ids(folder, document), *added.values()])


def _vocabulary_ids(folder: Path, document: Mapping[str, Any]) -> list[int]:
    vocabulary = (document.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        return [int(i) for i in vocabulary.values()]
    if isinstance(vocabulary, list):  # unigram models: a list of (piece, score)
        return list(range(len(vocabulary)))
    raise ArtifactError(f"{folder}/tokenizer.json: no vocabulary")


def _token_id(
    folder: Path,
    settings: Mapping[str, Any],
    document: Mapping[str, Any],
    role: str,
    added: Mapping[str, int],
) -> int | None:
    token = _text(settings.get(role))
    if token is None:
        return None
    vocabulary = (document.get("model") or {}).get("vocab")
    plain = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    found = added.get(token, plain)
    if found is None:
        raise ArtifactError(f"{folder}: {role} {token!r} has no id in tokenizer.json")
    return int(found)


def _text(token: Any) -> str | None:
    # Written as a string, or as a dictionary with the token's properties.
    return token.get("content") if isinstance(token, dict) else token


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    inline = settings.get("chat_template") or ""
    if isinstance(inline, list):  # several named ones
        inline = {one["name"]: one["template"] for one in inline}.get("default", "")
    return str(inline)


def _after_answer(folder: Path, template: str, settings: Mapping[str, Any]) -> str:
    """What the template writes after an assistant's answer."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    class Generation(Extension):
        """`{% generation %}` marks the answer for loss masks: here it is only its contents."""

        tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # As transformers renders templates, which come with a model and are not to be trusted.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "2000-01-01"}
    names = {role: _text(settings.get(role)) or "" for role in ("bos_token", "eos_token")}
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = environment.from_string(template).render(
            messages=talk, add_generation_prompt=False, **names
        )
    except (TemplateError, *_ANY) as error:
        raise ArtifactError(f"{folder}: the chat template does not render: {error}") from error
    _, found, ending = text.rpartition(_ANSWER)
    if not found:
        raise ArtifactError(f"{folder}: the chat template drops the assistant's answer")
    return ending.strip()
