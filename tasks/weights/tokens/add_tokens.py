"""Add new tokens to a base model: tokenizer, embeddings and config.json grow together.

Tokens are added once, to the base artifact, and not by every rank: training loads that artifact,
gather and merge take their shapes from it, and the served tokenizer is a copy of its tokenizer. A
new row is the mean of the old ones (Hewitt 2021, "Initializing New Word Embeddings for Pretrained
Language Models").
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.errors import ArtifactError, ConfigError
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.files.reader import weight_files
from tasks.weights.tokens.tokenizer import resized_config

if TYPE_CHECKING:
    import torch

_TABLES = (
    "embed_tokens.weight", "lm_head.weight", "lm_head.bias", "wte.weight", "embed_in.weight",
    "embed_out.weight", "word_embeddings.weight",
)  # fmt: skip
"""Ends of tensor names that have one row for each token."""
_INDEX = "model.safetensors.index.json"


class Grown(NamedTuple):
    """Ids of the new tokens in the order given, and rows of the embedding before and after."""

    ids: tuple[int, ...]
    before: int
    after: int


def grow(folder: Path, tokens: Sequence[str], *, multiple: int = 1) -> Grown:
    """Add tokens to a model folder. Files that are links are replaced, never written through.

    Each text becomes one ordinary token, so decoded text shows it; the number of rows becomes a
    multiple of `multiple`. Raises ConfigError if the tokenizer already has one of the tokens.
    """
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    known = sorted(set(tokens) & set(tokenizer.get_vocab()))
    if known or len(set(tokens)) < len(tokens):
        raise ConfigError(
            f"model.new_tokens: {', '.join(known) or 'the same token twice'}"
            + (" is in the vocabulary already" if known else ""),
            hint="remove it from model.new_tokens: tokens of the vocabulary are trained anyway",
        )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tokenizer.save_pretrained(made)
        for path in Path(made).iterdir():
            path.replace(folder / path.name)
    ids = tuple(int(i) for i in tokenizer.convert_tokens_to_ids(list(tokens)))
    config = read_json(folder / "config.json")
    before = int((config.get("text_config") or config)["vocab_size"])
    after = max(before, -(-(max(ids) + 1) // multiple) * multiple)
    if after > before:
        _grow_tables(folder, before, after)
        _replace_json(folder / "config.json", resized_config(config, after))
    return Grown(ids, before, after)


def _grow_tables(folder: Path, before: int, after: int) -> None:
    """Add rows to every table, one file after the other."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    added, has_table = 0, False
    for path in weight_files(folder, "*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names, metadata = list(file.keys()), file.metadata()
            tables = [name for name in names if name.endswith(_TABLES)]
            tables = [name for name in tables if file.get_slice(name).get_shape()[0] == before]
            tensors = {name: file.get_tensor(name) for name in names if tables}
        for name in tables:
            rows = _with_means(name, tensors[name], after)
            added += rows.nbytes - tensors[name].nbytes
            tensors[name] = rows
        if tables:
            work = path.with_name(f".{path.name}.tmp")
            save_file(tensors, work, metadata=metadata)
            work.replace(path)
            has_table = True
    if not has_table:
        raise ArtifactError(f"{folder}: no embedding of vocab_size={before} rows to add tokens to")
    if (folder / _INDEX).is_file():
        document = read_json(folder / _INDEX)
        metadata = document.setdefault("metadata", {})
        metadata["total_size"] = metadata.get("total_size", 0) + added
        _replace_json(folder / _INDEX, document)


def _with_means(name: str, table: torch.Tensor, rows: int) -> torch.Tensor:
    """Append the mean row, computed in fp64, until the table has `rows`."""
    import torch

    if table.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArtifactError(
            f"{name}: tokens can be added to BF16, F16 and F32 tables, not to {table.dtype}"
        )
    total = torch.stack([block.double().sum(dim=0) for block in table.split(4096)]).sum(dim=0)
    mean = (total / len(table)).float().to(table.dtype)
    return torch.cat([table, mean.expand(rows - len(table), *table.shape[1:])])


def _replace_json(path: Path, document: Any) -> None:
    work = path.with_name(f".{path.name}.tmp")
    write_json(work, document)
    work.replace(path)
