"""A token without a row in the base's embedding is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flows.cli.config import compose_config
from tasks.config.checks import findings
from tests.training.conftest import make_tokenizer

ROWS = 259  # 256 bytes and three special tokens


def with_tokenizer(base: Path, folder: Path, **changes: Any) -> Path:
    """Save the same weights with a tokenizer changed by transformers."""
    shutil.copytree(base, folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(changes)
    tokenizer.save_pretrained(folder)
    return folder


def found_of(base: Path, *overrides: str) -> list[str]:
    given = ["model=hf", f"model.path={base}", "train.max_len=64", *overrides]
    settings = compose_config(given).settings
    return [str(one) for one in findings(settings, base / "runs") if "embedding" in str(one)]


def test_a_pad_token_without_a_row_is_named(base: Path, tmp_path: Path) -> None:
    """`tokenizer.add_special_tokens({"pad_token": ...})` and no `resize_token_embeddings`."""
    assert found_of(base) == []
    (said,) = found_of(with_tokenizer(base, tmp_path / "padded", pad_token="[PAD]"))
    assert said.startswith(f"model.path: pad_token '[PAD]' has id {ROWS}, the embedding has {ROWS}")
    assert "embedding resized" in said
    assert 'another "pad_token" in its tokenizer_config.json' in said


def test_a_pad_token_that_no_vocabulary_knows_is_named(base: Path, tmp_path: Path) -> None:
    """transformers gives it the next id when it loads the tokenizer, an id without a row."""
    base = Path(shutil.copytree(base, tmp_path / "base"))
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "[PAD]"}))
    settings = compose_config(["model=hf", f"model.path={base}", "train.max_len=64"]).settings
    said = [str(one) for one in findings(settings, tmp_path / "runs")]
    assert any("pad_token '[PAD]' has no id in tokenizer.json" in one for one in said)


def test_other_tokens_without_a_row_are_found_too(base: Path, tmp_path: Path) -> None:
    base = with_tokenizer(base, tmp_path / "more", additional_special_tokens=["<a>", "<b>"])
    (said,) = found_of(base)
    assert said.startswith(f"model.path: the tokenizer has ids up to {ROWS + 1}, the embedding")
    assert found_of(base, "model.new_tokens=[new]") == []  # the base grows beyond all of them
