"""Conversations to token ids and back, with the tokenizer and chat template of a model folder.

A conversation is an object with `messages` and, if there are any, `tools`: a row of a dataset, or a
request to a server.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ContractError

Chat = Mapping[str, Any]
MAX_BLOCK = 16
"""Longest repeated block that is detected, in tokens."""

LOOP_REPEATS = 4
LOOP_TOKENS = 16
"""A loop is a block repeated at least LOOP_REPEATS times in a row over at least LOOP_TOKENS tokens.
"""


@dataclass(frozen=True)
class Prompts:
    """Token ids of rendered prompts, and the ids that end a response."""

    tokens: list[list[int]]
    eos: list[int]


def render(
    folder: Path, conversations: Sequence[Chat], template_from: Path | None = None
) -> Prompts:
    """Render each conversation as a prompt: without its last answer, with the generation prompt.

    A base model's folder may borrow its chat template from another one. Raises ContractError if
    there is none.
    """
    tokenizer = _with_template(folder, template_from)
    questions = map(question_of, conversations)
    prompts = [[int(i) for i in render_one(tokenizer, question)] for question in questions]
    return Prompts(prompts, stop_ids(folder, tokenizer.eos_token_id))


def question_of(row: Chat) -> dict[str, Any]:
    """Return the conversation of a row without the answer at its end."""
    messages = list(row["messages"])
    return chat(messages[:-1] if messages[-1]["role"] == "assistant" else messages, row)


def chat(messages: Sequence[Mapping[str, Any]], row: Chat) -> dict[str, Any]:
    """Return a conversation of these messages with the tools of a row."""
    return {"messages": list(messages), **({"tools": row["tools"]} if row.get("tools") else {})}


def render_whole(folder: Path, conversations: Sequence[Chat]) -> list[list[int]]:
    """Return the token ids of whole conversations, up to the id that ends the last answer.

    Raises ContractError without a chat template.
    """
    tokenizer = _with_template(folder)
    stops = set(stop_ids(folder, tokenizer.eos_token_id))
    return [whole_ids(tokenizer, conversation, stops) for conversation in conversations]


def _with_template(folder: Path, template_from: Path | None = None) -> Any:
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template and template_from is not None:
        tokenizer.chat_template = load_tokenizer(template_from).chat_template
    if not tokenizer.chat_template:
        raise ContractError(f"{folder}: the tokenizer has no chat template")
    return tokenizer


def whole_ids(tokenizer: Any, conversation: Chat, stops: Container[int]) -> list[int]:
    """Return the token ids of one whole conversation, up to the id that ends the last answer."""
    text = tokenizer.apply_chat_template(
        list(conversation["messages"]), tools=conversation.get("tools"), tokenize=False
    )
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in stops), len(ids) - 1)
    return ids[: last + 1]


def render_one(tokenizer: Any, conversation: Chat) -> list[int]:
    """Return one prompt's token ids, with the generation prompt at the end."""
    ids: list[int] = tokenizer.apply_chat_template(
        list(conversation["messages"]), tools=conversation.get("tools"),
        add_generation_prompt=True, tokenize=True, return_dict=False,
    )  # fmt: skip
    return ids


def decode(folder: Path, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of generated tokens, without special tokens."""
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in tokens]


def encode_texts(folder: Path, texts: Sequence[str], limit: int) -> list[list[int]]:
    """Return the token ids of plain texts by the tokenizer's defaults, cut off at `limit`."""
    tokenizer = load_tokenizer(folder)
    return [[int(i) for i in tokenizer(text)["input_ids"][:limit]] for text in texts]


def stop_ids(folder: Path, tokenizer_eos: int | None) -> list[int]:
    """Return every id at which a server of this folder stops, sorted."""
    stops = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            stops |= {int(i) for i in (eos if isinstance(eos, list) else [eos])}
    return sorted(stops)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder, from local files only. Raises ArtifactError."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").is_file():
        raise ArtifactError(f"{folder}: no tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def is_degenerate(tokens: Sequence[int]) -> bool:
    """Return True if a token sequence loops (see `LOOP_REPEATS`, `LOOP_TOKENS`)."""
    for block in range(1, MAX_BLOCK + 1):
        needed = max(LOOP_REPEATS, -(-LOOP_TOKENS // block)) * block - block
        same = 0
        for token, before in zip(tokens[block:], tokens, strict=False):
            same = same + 1 if token == before else 0
            if same >= needed:
                return True
    return False


def matches(text: str, answer: str) -> bool:
    """Return True if a text equals the answer, apart from surrounding whitespace."""
    return text.strip() == answer.strip()


def exact_match(texts: Sequence[str], answers: Sequence[str]) -> float:
    """Return the share of texts that equal their answer, apart from surrounding whitespace."""
    if not texts:
        raise ValueError("no text to compare")
    pairs = list(zip(texts, answers, strict=True))
    return sum(matches(text, answer) for text, answer in pairs) / len(pairs)
