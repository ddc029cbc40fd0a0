"""Altered artifacts are refused: one changed byte, even with the old mtime."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import Origin, publish, staging
from tasks.weights.files.header import read_header
from tests.delivery.conftest import Done
from tests.weights.making import Spread, trained_model

Run = Callable[..., Done]


def flip(file: Path) -> str:
    """Change a byte of the last tensor, keep size and mtime, and return the tensor's name."""
    before = file.stat()
    header = read_header(file)
    name, info = max(header.tensors.items(), key=lambda entry: entry[1].start)
    with file.open("r+b") as opened:
        opened.seek(info.start)
        (byte,) = opened.read(1)
        opened.seek(info.start)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    return name


def published_adapter(base: Path, out: Path, digest: str) -> Path:
    """Publish an adapter artifact like gather."""
    with staging(out) as work:
        trained_model(base, Spread(), 2).save_pretrained(work)
        (work / "README.md").unlink()
        notes = {"quantization": None}
        publish(work, out, Origin("adapter", "gather", out.name, {"base": digest}, notes=notes))
    return out


@pytest.fixture
def artifacts(ours: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Artifacts of a base and an adapter, to be altered."""
    base = tmp_path / "given" / "base"
    shutil.copytree(ours, base)
    digest = json.loads((base / "manifest.json").read_text())["digest"]
    return base, published_adapter(base, tmp_path / "given" / "adapter", digest)


def test_an_altered_full_model(either: Run, artifacts: tuple[Path, Path], tmp_path: Path) -> None:
    source, _ = artifacts
    out = tmp_path / "out"
    name = flip(source / "model.safetensors")
    arguments = (f"source={source}", f"out={out}")
    assert either(*arguments, "plan=true").code == 0
    done = either(*arguments)
    assert done.code == 1, done.output
    assert f"{source}/model.safetensors: tensor {name} changed" in done.output
    assert "altered since it was published" in done.output
    assert "manifest.json" in done.output.splitlines()[-1]
    assert not out.exists()
    (source / "manifest.json").unlink()  # the way out that the error names
    assert either(*arguments).code == 0


@pytest.mark.parametrize("damage", ["cut", *("kind", "digest", "tensors", "files")])
@pytest.mark.parametrize("what", ["base", "adapter"])
def test_a_damaged_manifest_does_not_switch_the_check_off(
    here: Run, what: str, damage: str, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = artifacts
    given = base if what == "base" else adapter
    flip(next(given.glob("*model.safetensors")))
    path = given / "manifest.json"
    text = path.read_text()
    document = {key: value for key, value in json.loads(text).items() if key != damage}
    path.write_text(text[: len(text) // 2] if damage == "cut" else json.dumps(document))
    out = tmp_path / "out"
    done = here(f"source={adapter}", f"base={base}", f"out={out}", "check_base=false")
    assert done.code != 0
    assert "manifest.json" in done.output
    assert not out.exists()


@pytest.mark.parametrize("what", ["base", "adapter"])
def test_an_altered_input_of_a_merge_is_noticed_after_a_good_delivery(
    here: Run, what: str, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = artifacts
    arguments = (f"source={adapter}", f"base={base}", f"out={tmp_path / 'out'}")
    done = here(*arguments)
    assert done.code == 0, done.output
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    again = here(*arguments)
    assert again.code == 0, again.output
    assert all(stage["reused"] for stage in again.summary["stages"])
    file = {"base": base / "model.safetensors", "adapter": adapter / "adapter_model.safetensors"}
    name = flip(file[what])
    done = here(*arguments)
    assert done.code == 2, done.output
    for part in (str(file[what].parent), name, "SHA256_DIFFERS"):
        assert part in done.output
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


def test_every_one_of_several_adapters_is_looked_at(
    here: Run, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    base, first = artifacts
    second = Path(shutil.copytree(first, tmp_path / "given" / "second"))
    name = flip(second / "adapter_model.safetensors")
    done = here(f"adapters=[{first}:0.5,{second}:0.5]", f"base={base}", f"out={tmp_path / 'out'}")
    assert done.code == 2, done.output
    for part in (f"source={second} tells the rest", name, "SHA256_DIFFERS"):
        assert part in done.output


def test_a_file_that_was_added_and_one_that_is_gone_are_both_named(
    here: Run, artifacts: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = artifacts
    (base / "generation_config.json").unlink()
    (adapter / "notes.txt").write_text("mine")
    done = here(f"source={adapter}", f"base={base}", f"out={tmp_path / 'out'}")
    assert done.code == 1, done.output
    assert f"{base}/generation_config.json: missing" in done.output
    assert f"{adapter}/notes.txt: not in the manifest" in done.output
