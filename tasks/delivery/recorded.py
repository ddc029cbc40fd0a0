"""Read the record that our own training left, if SOURCE came out of one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.delivery.recognise import Given
from tasks.weights.files.documents import read_json
from tasks.weights.files.identity import published

SDPA, FLASH = "sdpa", "flash_attention_2"


def training_record(given: Given, store: Path) -> dict[str, Any] | None:
    """Return `train.json` of the training that made SOURCE; None if there is no such record.

    Args:
        given: SOURCE: our shards, or an artifact whose manifest names them.
        store: folder of our artifacts.

    Raises:
        ArtifactError: the file cannot be read.
    """
    root: Path | None = given.root
    if given.kind != "shards":
        digest = given.manifest.get("inputs", {}).get("trained")
        root = published(digest, store, "shards") if digest else None
    path = None if root is None else root / "train.json"
    return read_json(path) if path is not None and path.is_file() else None


def attention_of(given: Given, store: Path) -> tuple[str, str]:
    """Return (attention to measure with, by transformers' name; a warning or "").

    Attention implementations round differently. With training's own, the measured drift is that of
    the weights alone.
    """
    record = training_record(given, store) or {}
    recorded = str(record.get("attn_implementation", SDPA))
    if recorded == FLASH and not _installed("flash-attn"):
        return SDPA, f"training ran {FLASH}, and flash-attn is not installed: measured with {SDPA}"
    return recorded, ""


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
