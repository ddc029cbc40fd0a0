"""Conversations to token ids and back, with the tokenizer and chat template of a model folder."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ContractError

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Rendered:
    """Prompts as token ids, and the ids that end a response."""

    prompts: list[list[int]]
    eos: list[int]


def render(
    folder: Path, conversations: Sequence[Messages], *, template_from: Path | None = None
) -> Rendered:
    """Render each conversation as a prompt: without its last answer, with the generation prompt.

    Args:
        folder: model folder with the tokenizer.
        conversations: message lists; a final assistant message is left out.
        template_from: folder of the chat template to use if `folder` has none (a base model).

    Raises:
        ContractError: no chat template.
    """
    tokenizer = _with_template(folder, template_from)
    questions = [
        messages[:-1] if messages[-1]["role"] == "assistant" else messages
        for messages in conversations
    ]
    prompts = [[int(i) for i in render_one(tokenizer, messages)] for messages in questions]
    return Rendered(prompts, stop_ids(folder, tokenizer.eos_token_id))


def render_whole(folder: Path, conversations: Sequence[Messages]) -> list[list[int]]:
    """Return the token ids of whole conversations, up to the id that ends the last answer.

    Args:
        folder: model folder with tokenizer and chat template.
        conversations: message lists whose last message is the assistant's.

    Raises:
        ContractError: no chat template.
    """
    tokenizer = _with_template(folder)
    stops = set(stop_ids(folder, tokenizer.eos_token_id))
    return [whole_ids(tokenizer, messages, stops) for messages in conversations]


def _with_template(folder: Path, template_from: Path | None = None) -> Any:
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template and template_from is not None:
        tokenizer.chat_template = load_tokenizer(template_from).chat_template
    if not tokenizer.chat_template:
        raise ContractError(f"{folder}: the tokenizer has no chat template")
    return tokenizer


def whole_ids(tokenizer: Any, messages: Messages, stops: Container[int]) -> list[int]:
    """Return the token ids of one whole conversation, up to the id that ends the last answer.

    Args:
        tokenizer: has a chat template.
        messages: the last one is the assistant's.
        stops: ids that end an answer.
    """
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in stops), len(ids) - 1)
    return ids[: last + 1]


def render_one(tokenizer: Any, messages: Messages) -> list[int]:
    """Return one prompt's token ids, with the generation prompt at the end."""
    ids: list[int] = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


def decode(folder: Path, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of generated tokens, without special tokens."""
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in tokens]


def encode_texts(folder: Path, texts: Sequence[str], limit: int) -> list[list[int]]:
    """Return the token ids of plain texts by the tokenizer's defaults.

    Args:
        folder: model folder with the tokenizer.
        texts: the texts.
        limit: maximum tokens per text; the rest is cut off.
    """
    tokenizer = load_tokenizer(folder)
    return [[int(i) for i in tokenizer(text)["input_ids"][:limit]] for text in texts]


def stop_ids(folder: Path, tokenizer_eos: int | None) -> list[int]:
    """Return every id at which a server of this folder stops, sorted.

    Args:
        folder: model folder with config.json and generation_config.json.
        tokenizer_eos: EOS id of its tokenizer, or None.
    """
    stops = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            stops |= {int(i) for i in (eos if isinstance(eos, list) else [eos])}
    return sorted(stops)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder, from local files only.

    Raises:
        ArtifactError: no tokenizer, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").is_file():
        raise ArtifactError(f"{folder}: no tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
