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


def test_only_files_of_a_tokenizer_are_taken(tmp_path: Path) -> None:
    source = folder(
        tmp_path / "source", "tokenizer_config.json", "vocab.json", "vocab.env", "tokenizer.pem",
        "secret.model", "qwen.tiktoken",
    )  # fmt: skip
    (source / "tokenizer").mkdir()
    names = [path.name for path in find_tokens([source]).files()]
    assert names == ["qwen.tiktoken", "tokenizer_config.json", "vocab.json"]


@pytest.mark.parametrize("name", ["merges.txt", "preprocessor_config.json", "vocab.txt"])
def test_a_link_out_of_the_folder(tmp_path: Path, name: str) -> None:
    source = folder(tmp_path / "source", "tokenizer_config.json", "vocab.json")
    (source / name).symlink_to("/proc/self/environ")
    with pytest.raises(ArtifactError, match=f"{name}: a link to /proc/self/environ") as caught:
        find_tokens([source])
    assert "cp -rL" in caught.value.hint


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
    with pytest.raises(ArtifactError, match="a link to"):
        find_tokens([source])


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_named_like_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    source = folder(tmp_path / "source", "tokenizer_config.json", "vocab.json")
    make(source / "merges.txt")
    with pytest.raises(ArtifactError, match=r"merges.txt: a folder, a pipe or a device"):
        find_tokens([source])


def test_no_tokenizer_anywhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_tokens([folder(tmp_path / "source", "preprocessor_config.json")])
    assert "no tokenizer in" in caught.value.message
    assert "base=" in caught.value.hint


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
