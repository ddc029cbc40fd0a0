"""Altered artifacts and foreign side files are refused; a killed delivery leaves OUT whole."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.files import UMASK, stay_private
from tasks.delivery.base import folder_identity
from tasks.delivery.folders import put
from tasks.delivery.tokens import find_tokens
from tasks.pipeline.artifact import Artifact, Origin, open_artifact, publish, staging, verify
from tasks.rl.reward_model import model_digest
from tasks.weights.files.folder import foreign_entries
from tasks.weights.files.reader import read_header
from tests.delivery.conftest import Done
from tests.killing import kills
from tests.weights.making import Spread, trained_model

Run = Callable[..., Done]


def flip(file: Path) -> str:
    """Change a byte of the last tensor, keep size and mtime, and return the tensor's name."""
    before = file.stat()
    name, info = max(read_header(file).tensors.items(), key=lambda entry: entry[1].extents[0].start)
    raw = bytearray(file.read_bytes())
    raw[info.extents[0].start] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    return name


@pytest.fixture
def artifacts(ours: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Artifacts of a base and an adapter, as gather publishes it, to be altered."""
    base = Path(shutil.copytree(ours, tmp_path / "inputs" / "base"))
    digest = json.loads((base / "manifest.json").read_text())["digest"]
    out = tmp_path / "inputs" / "adapter"
    with staging(out) as work:
        trained_model(base, Spread(), 2).save_pretrained(work)
        (work / "README.md").unlink()
        notes = {"quantization": None}
        publish(work, out, Origin("adapter", "gather", out.name, {"base": digest}, notes=notes))
    return base, out


def test_a_damaged_manifest_does_not_switch_the_check_off(here, artifacts) -> None:
    base, adapter = artifacts
    for folder, damage in ((base, "cut"), (base, "kind"), (adapter, "digest"), (adapter, "files")):
        (weights,) = folder.glob("*model.safetensors")
        path = folder / "manifest.json"
        good, text = weights.read_bytes(), path.read_text()
        flip(weights)
        document = {key: value for key, value in json.loads(text).items() if key != damage}
        path.write_text(text[: len(text) // 2] if damage == "cut" else json.dumps(document))
        done = here(f"source={adapter}", f"base={base}", "check_base=false", code=2)
        assert str(path) in done.output, damage
        path.write_text(text)
        weights.write_bytes(good)


def test_an_altered_input_of_a_merge_is_noticed_after_a_good_delivery(
    here: Run, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = artifacts
    arguments = (f"source={adapter}", f"base={base}")
    here(*arguments)
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    for file, code in ((base / "model.safetensors", 1), (adapter / "adapter_model.safetensors", 2)):
        good = file.read_bytes()
        name = flip(file)
        done = here(*arguments, code=code)
        assert str(file.parent) in done.output
        assert name in done.output
        assert (tmp_path / "out" / "manifest.json").read_bytes() == before
        file.write_bytes(good)


def test_a_file_that_was_added_and_one_that_is_gone_are_both_named(here, artifacts) -> None:
    base, adapter = artifacts
    (base / "generation_config.json").unlink()
    (adapter / "notes.txt").write_text("mine")
    done = here(f"source={adapter}", f"base={base}", code=1)
    assert f"{base}/generation_config.json" in done.output
    assert f"{adapter}/notes.txt" in done.output


@pytest.mark.parametrize(
    "identity", [folder_identity, model_digest, lambda folder: find_tokens([folder]).identity()]
)
def test_an_altered_file_of_a_foreign_folder_changes_the_key(identity, tmp_path) -> None:
    for name in ("model.safetensors", "vocab.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    file = tmp_path / "tokenizer_config.json"
    stat = file.stat()
    time.sleep(0.02)  # the kernel's clock for ctimes ticks every 10 ms or faster
    file.write_text("{!")
    file.write_text("[]")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert identity(tmp_path) != before


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


def test_killed_at_any_change_of_the_disk_out_is_the_old_delivery_or_the_new(tmp_path) -> None:
    out, visible = tmp_path / "there" / "out", set()
    stay_private()  # as every command

    def served(name: str) -> Artifact:
        with staging(tmp_path / name) as work:
            save_file({"w": torch.full((2,), len(name))}, work / "model.safetensors")
            (work / "config.json").write_text(name)
            return publish(work, tmp_path / name, Origin("served", "convert", name))

    old, new = served("old"), served("newer")
    put(old, out, "# Card")
    for _ in kills(lambda: put(new, out, "# Card")):
        if out.exists():
            artifact = open_artifact(out)
            assert verify(artifact) == []
            visible.add(artifact.digest)
        put(new, out, "# Card")
        assert verify(open_artifact(out)) == []
        put(old, out, "# Card")
        assert list(out.parent.iterdir()) == [out]
    assert visible == {old.digest, new.digest}
    mode = 0o666 & ~int(os.environ[UMASK], 8)  # other users may serve it
    assert (out / "manifest.json").stat().st_mode & 0o777 == mode
    assert (new.path / "manifest.json").stat().st_mode & 0o077 == 0
