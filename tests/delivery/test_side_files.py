"""Side files of a delivered model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError, ConfigError
from tasks.delivery.side_files import find_tokens
from tasks.weights.files.side_files import foreign_entries


def folder(root: Path, *names: str) -> Path:
    root.mkdir()
    for name in names:
        (root / name).write_text("{}")
    return root


def test_files_of_tokenizer_and_processor_are_taken_and_no_others(tmp_path: Path) -> None:
    """A tokenizer that training saved leaves the base's processors where they are."""
    source = folder(
        tmp_path / "source", "tokenizer_config.json", "vocab.json", "qwen.tiktoken", "vocab.env",
        "tokenizer.pem", "secret.model",
    )  # fmt: skip
    (source / "tokenizer").mkdir()
    base = folder(
        tmp_path / "base", "tokenizer_config.json", "vocab.json", "preprocessor_config.json",
        "video_preprocessor_config.json",
    )  # fmt: skip
    folders = {path.name: path.parent.name for path in find_tokens([source, base]).files()}
    assert folders == {
        **dict.fromkeys(("tokenizer_config.json", "vocab.json", "qwen.tiktoken"), "source"),
        **dict.fromkeys(("preprocessor_config.json", "video_preprocessor_config.json"), "base"),
    }
    with pytest.raises(ConfigError) as caught:
        find_tokens([folder(tmp_path / "none", "preprocessor_config.json")])
    assert "base=" in caught.value.hint


def _link(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


@pytest.mark.parametrize("make", [_link, Path.mkdir, os.mkfifo])
def test_entries_that_are_no_files_of_the_folder(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    source = folder(tmp_path / "source", "tokenizer_config.json", "vocab.json")
    for name in ("merges.txt", "preprocessor_config.json") if make is _link else ("merges.txt",):
        make(source / name)
        with pytest.raises(ArtifactError, match=name):
            find_tokens([source])
        (source / name).rmdir() if make is Path.mkdir else (source / name).unlink()


def test_a_link_in_a_hub_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--somebody--something"
    (repository / "snapshots").mkdir(parents=True)
    source = folder(repository / "snapshots" / "0123", "tokenizer_config.json", "vocab.json")
    folder(repository / "blobs", "beef")
    (source / "merges.txt").symlink_to("../../blobs/beef")
    assert source / "merges.txt" in find_tokens([source]).files()
    (source / "merges.txt").unlink()
    folder(tmp_path / "blobs", "beef")
    (source / "merges.txt").symlink_to("../../../blobs/beef")
    with pytest.raises(ArtifactError, match="merges.txt"):
        find_tokens([source])


def test_weights_of_a_base_artifact_may_be_links(tmp_path: Path) -> None:
    """`prepare_base` links them; their bytes are compared with the manifest before use."""
    source, elsewhere = folder(tmp_path / "source"), folder(tmp_path / "elsewhere", "weights")
    (source / "model.safetensors").symlink_to(elsewhere / "weights")
    (source / "vocab.txt").symlink_to(elsewhere / "weights")
    manifest = {"kind": "base", "digest": "", "tensors": {}, "files": {}, "inputs": {}, "notes": {}}
    assert len(foreign_entries(source)) == 2
    (source / "manifest.json").write_text(json.dumps(manifest))
    assert [line.partition(":")[0] for line in foreign_entries(source)] == ["vocab.txt"]
    (source / "manifest.json").write_text(json.dumps({**manifest, "kind": "served"}))
    assert len(foreign_entries(source)) == 2
