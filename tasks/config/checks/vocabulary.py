"""Tokens that the base's embedding has no row for.

A tokenizer that was given a padding token, and an embedding that was not resized for it, train
without a complaint, since nothing is padded here. It breaks where somebody serves a padded batch:
the id lies past the table's end.
"""

from __future__ import annotations

from pathlib import Path

from tasks.config.checks.finding import Finding
from tasks.core.errors import ArtifactError
from tasks.weights.files.tokenizer import token_ids


def embedded(folder: Path, rows: int | None) -> list[Finding]:
    """The padding token first, then the other special ones, then whatever else has no row.

    Args:
        folder: the base; nothing is found where it has no `tokenizer.json`.
        rows: of its input embedding; None where that is not known.
    """
    if rows is None or not (folder / "tokenizer.json").is_file():
        return []
    try:
        special, highest = token_ids(folder)
    except ArtifactError as error:
        return [_finding(error.message, "pad_token")]
    found = [
        _finding(f"{role} {text!r} has id {token}, the embedding has {rows} rows", role)
        for role, (text, token) in special.items()
        if token >= rows
    ]
    if not found and highest >= rows:
        found.append(_finding(f"the tokenizer has ids up to {highest}, the embedding {rows} rows"))
    return found


def _finding(found: str, role: str = "") -> Finding:
    override = "model.path=<the base with its embedding resized>"
    if role:
        override += f', or another "{role}" in its tokenizer_config.json'
    return Finding("model.path", found, "a row for every id", override)
