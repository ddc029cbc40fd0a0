"""Artifacts: existence means complete, and an altered byte is noticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import (
    Artifact,
    Origin,
    intact,
    open_artifact,
    publish,
    staging,
    sweep,
    verify,
)
from tests.killing import kills

ORIGIN = Origin(kind="weights", stage="merge", key="k", inputs={"base": "d"}, config={"a": 1})


def make(final: Path, value: float = 1.0) -> Artifact:
    with staging(final) as work:
        tensors = {"w": np.full((2, 3), value, np.float32), "b": np.zeros(3, np.float32)}
        save_file(tensors, work / "model.safetensors")
        (work / "sub").mkdir()
        (work / "sub" / "note.txt").write_text("hello")
        return publish(work, final, ORIGIN)


def test_the_manifest_names_every_tensor_and_every_file(tmp_path: Path) -> None:
    artifact = make(tmp_path / "a")
    document = json.loads((artifact.path / "manifest.json").read_text())
    entry = document["tensors"]["model.safetensors"]["w"]
    assert (entry["shape"], entry["dtype"]) == ([2, 3], "F32")
    assert set(document["files"]) == {"model.safetensors", "sub/note.txt"}
    assert entry["blake3"] == blake3(np.ones((2, 3), np.float32).tobytes()).hexdigest()
    note = {"size": 5, "blake3": blake3(b"hello").hexdigest()}
    assert document["files"]["sub/note.txt"] == note
    assert document["inputs"] == {"base": "d"}
    assert open_artifact(tmp_path / "a", "weights") == artifact
    assert verify(artifact) == []


def test_nothing_is_visible_when_the_body_raises(tmp_path: Path) -> None:
    def half() -> None:
        with staging(tmp_path / "a") as work:
            (work / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert list(tmp_path.iterdir()) == []


def test_one_flipped_byte_is_noticed_even_with_the_old_mtime(tmp_path: Path) -> None:
    artifact, seen = make(tmp_path / "a"), tmp_path / "seen"
    assert intact(artifact, seen) == []
    path = artifact.path / "model.safetensors"
    stat = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (problem,) = intact(artifact, seen)
    assert problem.startswith("model.safetensors: tensor ")


def test_what_is_no_whole_artifact_of_the_kind_is_refused(tmp_path: Path) -> None:
    for number, (change, text) in enumerate(
        (
            (lambda p: (p / "sub/note.txt").unlink(), "sub/note.txt: missing"),
            (lambda p: (p / "sub/note.txt").write_text("longer"), "sub/note.txt: 6 bytes"),
            (lambda p: (p / "v_head.bin").write_text("x"), "v_head.bin: not in the manifest"),
        )
    ):
        path = make(tmp_path / f"a{number}").path
        change(path)
        with pytest.raises(ArtifactError) as caught:
            open_artifact(path)
        assert any(text in line for line in caught.value.details)
    with pytest.raises(ArtifactError, match="artifact"):
        open_artifact(tmp_path)
    make(tmp_path / "a")
    with pytest.raises(ArtifactError, match="weights"):
        open_artifact(tmp_path / "a", "adapter")


def test_publishing_again_replaces_and_leaves_no_rest(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    second = make(tmp_path / "a", value=5.0)
    assert first.digest != second.digest
    assert make(tmp_path / "b", value=5.0).digest == second.digest, "of contents, not of the place"
    assert verify(second) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_killed_at_any_change_of_the_disk_the_old_artifact_is_there_or_the_new(tmp_path) -> None:
    """Between the two renames there is none; the next run clears what a killed one left."""
    final, visible = tmp_path / "kind" / "a", set()
    make(final)
    for _ in kills(lambda: make(final, value=5.0)):
        if final.exists():
            artifact = open_artifact(final)
            assert verify(artifact) == []
            visible.add(artifact.digest)
        make(final)
        assert list(final.parent.iterdir()) == [final]
    assert len(visible) == 2
    staging_folder = final.parent / ".b.tmp"
    staging_folder.mkdir()
    sweep(tmp_path)
    assert list(final.parent.iterdir()) == [final]
