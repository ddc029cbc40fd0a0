"""Add new tokens to a base model: tokenizer, embeddings and config.json grow together.

Tokens are added once, to the base artifact, and not by every rank: training loads that artifact,
gather and merge take their shapes from it, and the served tokenizer is a copy of its tokenizer. A
new row is the mean of the old ones (Hewitt 2021, "Initializing New Word Embeddings for Pretrained
Language Models").
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, ConfigError
from tasks.weights.execute.writer import Spec, shard_file
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import NUMPY, cast, widened
from tasks.weights.files.header import Header, TensorInfo, read_header
from tasks.weights.files.reader import weight_files
from tasks.weights.tokens.vocabulary import resized_config

_TABLES = (
    "embed_tokens.weight", "lm_head.weight", "lm_head.bias", "wte.weight", "embed_in.weight",
    "embed_out.weight", "word_embeddings.weight",
)  # fmt: skip
"""Ends of tensor names that have one row for each token."""
_BLOCK = 1 << 24
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Grown:
    """Result of `grow`.

    Attributes:
        ids: ids of the new tokens, in the order given.
        before: rows of the embedding before.
        after: rows of the embedding now.
    """

    ids: tuple[int, ...]
    before: int
    after: int


def grow(folder: Path, tokens: Sequence[str], *, multiple: int = 1) -> Grown:
    """Add tokens to a model folder. Files that are links are replaced, never written through.

    Args:
        folder: folder with config.json, safetensors files and a tokenizer.
        tokens: texts to add; each becomes one ordinary token, so decoded text shows it.
        multiple: the number of rows becomes a multiple of this.

    Raises:
        ConfigError: the tokenizer already has one of the tokens.
        ArtifactError: no embedding has `vocab_size` rows, or its dtype is not F32, F16 or BF16.
    """
    config = read_json(folder / "config.json")
    before = int((config.get("text_config") or config)["vocab_size"])
    ids = _into_tokenizer(folder, tokens)
    after = max(before, -(-(max(ids) + 1) // multiple) * multiple)
    if after > before:
        _into_tables(folder, before, after)
        text = json.dumps(resized_config(config, after), indent=2, sort_keys=True)
        _replace(folder / "config.json", (text + "\n").encode())
    return Grown(ids, before, after)


def _into_tokenizer(folder: Path, tokens: Sequence[str]) -> tuple[int, ...]:
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
    return tuple(int(i) for i in tokenizer.convert_tokens_to_ids(list(tokens)))


def _into_tables(folder: Path, before: int, after: int) -> None:
    added, has_table = 0, False
    for path in weight_files(folder, "*.safetensors"):
        header = read_header(path)
        tables = {
            name
            for name, info in header.tensors.items()
            if name.endswith(_TABLES) and info.shape[0] == before
        }
        if tables:
            added += _rewrite(path, header, tables, after)
            has_table = True
    if not has_table:
        raise ArtifactError(f"{folder}: no embedding of vocab_size={before} rows to add tokens to")
    index = folder / _INDEX
    if index.is_file():
        document = read_json(index)
        document.setdefault("metadata", {})
        document["metadata"]["total_size"] = document["metadata"].get("total_size", 0) + added
        _replace(index, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())


def _rewrite(path: Path, header: Header, tables: set[str], after: int) -> int:
    """Rewrite one file with longer tables. Return the number of tensor bytes added."""
    specs = [
        Spec(name, (after, *info.shape[1:]) if name in tables else info.shape, info.dtype)
        for name, info in header.tensors.items()
    ]
    file = shard_file(path.name, specs)
    work = path.with_name(f".{path.name}.tmp")
    data = np.memmap(path, np.uint8, "r")
    with work.open("wb") as out:
        out.write(file.head)
        for spec in specs:
            info = header.tensors[spec.name]
            out.seek(file.infos[spec.name].start)
            for at in range(info.start, info.end, _BLOCK):
                out.write(data[at : min(at + _BLOCK, info.end)].tobytes())
            if spec.name in tables:
                out.write(_mean_row(data, info, spec.name) * (after - info.shape[0]))
        out.truncate(file.size)
    work.replace(path)
    return sum(spec.nbytes - header.tensors[spec.name].nbytes for spec in specs)


def _mean_row(data: NDArray[np.uint8], info: TensorInfo, name: str) -> bytes:
    """Return the mean row as bytes in the tensor's dtype, computed in fp64 and rounded once."""
    if info.dtype not in NUMPY:
        raise ArtifactError(
            f"{name}: tokens can be added to BF16, F16 and F32 tables, not to {info.dtype}"
        )
    rows = data[info.start : info.end].reshape(info.shape[0], -1)
    total: Any = 0.0
    for at in range(0, len(rows), 4096):
        block = rows[at : at + 4096]
        numbers = widened(np.array(block).reshape(-1), info.dtype).reshape(len(block), -1)
        total += numbers.astype(np.float64).sum(axis=0)
    mean = np.asarray(total / len(rows), np.float32)
    return cast(mean.reshape(-1).view(np.uint8), "F32", info.dtype).tobytes()


def _replace(path: Path, content: bytes) -> None:
    work = path.with_name(f".{path.name}.tmp")
    work.write_bytes(content)
    work.replace(path)
