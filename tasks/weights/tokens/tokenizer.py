"""Read a tokenizer folder: number of ids, EOS and padding ids, chat template.

Reads the files themselves (`tokenizer.json`, `tokenizer_config.json`, the chat template), which
takes milliseconds and needs no model library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.files.documents import read_json, read_text
from tasks.weights.tokens.render_template import (
    MAX_CHARACTERS,
    TemplateError,
    TemplateLimitError,
    after_answer,
    rendered,
)

if TYPE_CHECKING:
    from tasks.weights.model import Model

_ROLES = ("pad_token", "eos_token", "bos_token", "unk_token")


@dataclass(frozen=True)
class TokenizerFacts:
    """Ids and template of a tokenizer."""

    rows: int  # highest id + 1: the smallest number of rows of a fitting embedding
    eos: int
    pad: int | None
    end_of_turn: int | None  # special token that the chat template writes after a response
    template: str  # "" if there is none

    @property
    def stops(self) -> list[int]:
        """Ids that end a response, the tokenizer's EOS first."""
        ids = [self.eos, self.end_of_turn]
        return list(dict.fromkeys(token for token in ids if token is not None))


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Read a tokenizer folder.

    Raises ArtifactError: no EOS token, a special token without an id, or a chat template that does
    not render.
    """
    try:
        return _read(folder, read_json(folder / "tokenizer.json"), _settings(folder))
    except TemplateError as error:
        raise ArtifactError(
            f"{_template_file(folder)}: {error}",
            hint="correct the chat template, or copy that of the model's first release",
        ) from error
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{folder}: tokenizer.json or tokenizer_config.json has a value of an unknown type: "
            f"{error}"
        ) from error


def _read(folder: Path, document: Mapping[str, Any], settings: Mapping[str, Any]) -> TokenizerFacts:
    vocabulary = (document.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict | list):
        raise ArtifactError(f"{folder}/tokenizer.json: no vocabulary")
    if isinstance(vocabulary, list):  # (piece, score) of Unigram models
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    added: Sequence[Mapping[str, Any]] = document.get("added_tokens", [])
    ids = vocabulary | {str(token["content"]): int(token["id"]) for token in added}
    special: dict[str, int] = {}
    for role in ("eos_token", "pad_token"):
        token = _text(settings.get(role))
        if token is not None and token not in ids:
            raise ArtifactError(f"{folder}: {role} {token!r} has no id in tokenizer.json")
        if token is not None:
            special[role] = ids[token]
    if "eos_token" not in special:
        raise ArtifactError(f"{folder}: the tokenizer names no eos_token")
    template, turn = template_of(folder), ""
    if template:
        ending = after_answer(template, _ends(settings))
        texts = [str(token["content"]) for token in added if token.get("special")]
        turn = max((text for text in texts if ending.startswith(text)), key=len, default="")
    return TokenizerFacts(
        rows=max(ids.values()) + 1,
        eos=special["eos_token"],
        pad=special.get("pad_token"),
        end_of_turn=ids[turn] if turn else None,
        template=template,
    )


def control_tokens(read: Callable[[str], Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the texts that a tokenizer turns into special tokens or ends of responses, sorted.

    Single characters are left out: a tokenizer that pads with "!" reads it as every other does.
    `read` returns a JSON file of the model's folder by its name, {} if there is none.
    """
    settings, added = read("tokenizer_config.json"), _list(read("tokenizer.json"), "added_tokens")
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        added += [{"id": i, **token} for i, token in listed.items() if isinstance(token, dict)]
    configs = [read(name) for name in ("config.json", "generation_config.json")]
    ends = {str(i) for config in configs for i in _list(config, "eos_token_id")}
    named = [settings.get(role) for role in _ROLES]
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


def _text(token: Any) -> str | None:
    # A special token is stored as a string, or as an object with the token's properties.
    return token.get("content") if isinstance(token, dict) else token


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def template_of(folder: Path) -> str:
    """Return the chat template of a tokenizer folder; "" if it has none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path, MAX_CHARACTERS)
    return default_template(_settings(folder).get("chat_template"))


def default_template(value: object) -> str:
    """Return the default template of `chat_template`: a text, a mapping, or a list of pairs."""
    if isinstance(value, Mapping):
        value = value.get("default")
    elif isinstance(value, list):
        named = [pair for pair in value if isinstance(pair, Mapping)]
        value = next((p.get("template") for p in named if p.get("name") == "default"), None)
    return value if isinstance(value, str) else ""


def prompts_of(
    folder: Path,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Return lists of messages with the generation prompt, as a chat template writes them.

    `template` is its text; None: that of the folder. Raises TemplateError if it does not render.
    """
    text = template_of(folder) if template is None else template
    return rendered(text, _ends(_settings(folder)), conversations, prompt=True, tools=tools)


def _ends(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of BOS and EOS, which templates use."""
    return {role: _text(settings.get(role)) or "" for role in ("bos_token", "eos_token")}


def _template_file(folder: Path) -> Path:
    path = folder / "chat_template.jinja"
    return path if path.is_file() else folder / "tokenizer_config.json"


def require_bounded_template(folder: Path) -> None:
    """Refuse a chat template whose rendering takes too much time or memory.

    Other faults of a template are left to those who use it: a base may be trained without one.
    Raises ArtifactError, which names the file of the template.
    """
    try:
        after_answer(template_of(folder), {"bos_token": "", "eos_token": ""})
    except TemplateLimitError as error:
        raise ArtifactError(
            f"{_template_file(folder)}: {error}",
            hint="a template that does this serves no model: remove it, or take another model",
        ) from error
    except TemplateError:
        return


# The vocabulary of a model.

_SAVE_WHOLE = (
    "save an adapter with its embeddings: save_pretrained(..., save_embedding_layers=True), or "
    "train with modules_to_save=[embed_tokens, lm_head]"
)


def vocabulary_findings(
    shapes: Mapping[str, tuple[int, ...]], facts: Model, tokenizer: TokenizerFacts
) -> Iterator[str]:
    """Yield where tokenizer, embedding and output head disagree; `shapes` are by key.

    Raises ContractError if it has no input embedding.
    """
    if facts.embedding not in shapes:
        raise ContractError(f"no {facts.embedding}: the model has no input embedding")
    live, rows = f"{facts.output_embedding}.weight", shapes[facts.embedding][0]
    stored = {slot.live: slot.key for slot in facts.slots if slot.is_all}
    head = shapes.get(stored.get(live, facts.aliases.get(live, live)))
    if tokenizer.rows > rows:
        text = f"the tokenizer has {tokenizer.rows} ids, the embedding {rows} rows"
        yield f"{text}: some ids have no row; {_SAVE_WHOLE}"
    if head is not None and head[0] != rows:
        yield (
            f"the input embedding has {rows} rows, the output embedding {head[0]}: only one of "
            f"them was saved after the vocabulary changed; {_SAVE_WHOLE}"
        )
    special = {f"eos_token_id {token}": token for token in tokenizer.stops}
    if tokenizer.pad is not None:
        special["pad_token_id"] = tokenizer.pad
    for name, token in special.items():
        if not 0 <= token < rows:
            yield f"{name} is {token}, the embedding has {rows} rows"


def resized_config(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return config.json with `vocab_size` set to `rows`, also in a nested `text_config`."""
    text = config.get("text_config")
    if isinstance(text, dict):
        nested = {**text, "vocab_size": rows}
        top = {"vocab_size": rows} if "vocab_size" in config else {}
        return {**config, **top, "text_config": nested}
    return {**config, "vocab_size": rows}
