"""Side files of a delivered model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.errors import ConfigError
from tasks.delivery.side_files import find_tokens


def folder(root: Path, *names: str) -> Path:
    root.mkdir()
    for name in names:
        (root / name).write_text("{}")
    return root


def test_a_tokenizer_that_training_saved_leaves_the_bases_processors_where_they_are(
    tmp_path: Path,
) -> None:
    source = folder(tmp_path / "source", "tokenizer_config.json", "vocab.json", "merges.txt")
    base = folder(
        tmp_path / "base", "tokenizer_config.json", "vocab.json", "preprocessor_config.json",
        "video_preprocessor_config.json",
    )  # fmt: skip
    folders = {path.name: path.parent.name for path in find_tokens([source, base]).files()}
    assert folders == {
        "tokenizer_config.json": "source",
        "vocab.json": "source",
        "merges.txt": "source",
        "preprocessor_config.json": "base",
        "video_preprocessor_config.json": "base",
    }


def test_no_tokenizer_anywhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_tokens([folder(tmp_path / "source", "preprocessor_config.json")])
    assert "no tokenizer in" in caught.value.message
    assert "base=" in caught.value.hint
