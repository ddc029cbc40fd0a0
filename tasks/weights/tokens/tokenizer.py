"""Read a tokenizer folder: number of ids, EOS and padding ids, chat template.

Reads the files themselves (`tokenizer.json`, `tokenizer_config.json`, the chat template), which
takes milliseconds and needs no model library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json, read_text
from tasks.weights.tokens.render_template import (
    MAX_CHARACTERS,
    TemplateError,
    TemplateLimitError,
    after_answer,
    rendered,
)


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
    with _wrong_types_named(folder):
        return _read(folder)


@contextmanager
def _wrong_types_named(folder: Path) -> Iterator[None]:
    """Turn the exceptions of JSON values of unexpected types into an ArtifactError."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{folder}: tokenizer.json or tokenizer_config.json has a value of an unknown type: "
            f"{error}"
        ) from error


def _read(folder: Path) -> TokenizerFacts:
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
    with _wrong_types_named(folder):
        return _token_ids(folder)


def control_tokens(read: Callable[[str], Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the texts that a tokenizer turns into special tokens or ends of responses, sorted.

    Single characters are left out: a tokenizer that pads with "!" reads it as every other does.

    Args:
        read: returns a JSON file of the model's folder by its name, {} if there is none.
    """
    settings, added = read("tokenizer_config.json"), _list(read("tokenizer.json"), "added_tokens")
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        added += [{"id": i, **token} for i, token in listed.items() if isinstance(token, dict)]
    configs = [read(name) for name in ("config.json", "generation_config.json")]
    ends = {str(i) for config in configs for i in _list(config, "eos_token_id")}
    named = [settings.get(f"{role}_token") for role in ("bos", "eos", "pad", "unk")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        named += _list(settings, key)
    named += [
        t for t in added if isinstance(t, dict) and (t.get("special") or str(t.get("id")) in ends)
    ]
    texts = {text for token in named if isinstance(text := _text(token), str)}
    return tuple(sorted(text for text in texts if len(text.strip()) > 1))


def _list(document: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values of a list or mapping, or the only value, as a list."""
    value = document.get(key)
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else [value]


def _token_ids(folder: Path) -> tuple[dict[str, tuple[str, int]], int]:
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
        return read_text(path, MAX_CHARACTERS)
    inline = settings.get("chat_template") or ""
    if isinstance(inline, list):  # several templates, each with a name
        inline = {named["name"]: named["template"] for named in inline}.get("default", "")
    return str(inline)


def _after_answer(folder: Path, template: str, settings: Mapping[str, Any]) -> str:
    """Return the text that the template writes after an assistant's response."""
    try:
        return after_answer(template, _tokens(settings))
    except TemplateError as error:
        raise ArtifactError(
            f"{template_file(folder)}: {error}",
            hint="correct the chat template, or copy that of the model's first release",
        ) from error


def _tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    return {role: _text(settings.get(role)) or "" for role in ("bos_token", "eos_token")}


def prompts_of(
    folder: Path,
    conversations: Sequence[Sequence[Mapping[str, str]]],
    template: str | None = None,
) -> list[str]:
    """Return conversations with the generation prompt, as the chat template writes them.

    Args:
        folder: tokenizer folder.
        conversations: lists of messages.
        template: source text; None: that of the folder.

    Raises:
        TemplateError: it does not render.
    """
    text = template_of(folder) if template is None else template
    return rendered(text, _tokens(_settings(folder)), conversations, prompt=True)


def template_of(folder: Path) -> str:
    """Return the chat template of a tokenizer folder; "" if it has none."""
    return _template(folder, _settings(folder))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def template_file(folder: Path) -> Path:
    """Return the file that holds the chat template of a tokenizer folder."""
    path = folder / "chat_template.jinja"
    return path if path.is_file() else folder / "tokenizer_config.json"


def require_bounded_template(folder: Path) -> None:
    """Refuse a chat template whose rendering takes too much time or memory.

    Other faults of a template are left to those who use it: a base may be trained without one.

    Raises:
        ArtifactError: names the file of the template.
    """
    try:
        after_answer(template_of(folder), {"bos_token": "", "eos_token": ""})
    except TemplateLimitError as error:
        raise ArtifactError(
            f"{template_file(folder)}: {error}",
            hint="a template that does this serves no model: remove it, or take another model",
        ) from error
    except TemplateError:
        return
