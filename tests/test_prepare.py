"""prepare: base and data as artifacts; what cannot be used is refused at once."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.core.errors import ArtifactError, ConfigError, DataError
from tasks.delivery.source import require_sound
from tasks.pipeline.stage import StageReport
from tasks.prepare import prepare_base, prepare_data, resolve_model, source_identity
from tests.machines import with_hub, with_hub_at

LOG = logging.getLogger("tests.prepare")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model with two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros((2, 3), np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(4, np.float32)}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _prepare(model: Path, tmp_path: Path) -> StageReport:
    out = tmp_path / "out"
    out.mkdir()
    return prepare_base(out, kind="hf", path=str(model), log_path=tmp_path / "base.log", log=LOG)


def test_weights_of_a_model_are_linked_and_side_files_copied(model: Path, tmp_path: Path) -> None:
    for stray in ("pytorch_model.bin", "consolidated.safetensors", "manifest.json", "x.fp", ".a",
                  "vocab.env", "tokenizer.pem", "README.md", "modeling_x.py"):  # fmt: skip
        (model / stray).write_text("not part of it")
    beside = ["added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt",
              "preprocessor_config.json", "special_tokens_map.json", "tokenizer.json",
              "tokenizer_config.json"]  # fmt: skip
    for name in beside:
        (model / name).write_text("{}")
    (model / "tokenizer.json").chmod(0o777)
    before = os.umask(0o077)
    try:
        report = _prepare(model, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "tokenizer.json").stat().st_mode & 0o777 == 0o600
    made = {path.name: path.resolve() for path in (tmp_path / "out").iterdir()}
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "model.safetensors.index.json", *beside]  # fmt: skip
    weights = [name for name in names if name.endswith(".safetensors")]
    assert made == {
        name: (model if name in weights else tmp_path / "out").resolve() / name for name in names
    }
    assert report.kind == "base"
    assert (report.metrics["base/tensors"], report.metrics["base/bytes"]) == (2.0, 40.0)


def test_links_out_of_the_folder_are_refused(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "id_ed25519"
    secret.write_text("secret")
    (model / "vocab.txt").symlink_to(secret)
    (model / "vocab.env").symlink_to("/proc/self/environ")
    os.mkfifo(model / "merges.txt")
    with pytest.raises(ArtifactError) as caught:
        _prepare(model, tmp_path)
    names = [line.partition(":")[0] for line in caught.value.details]
    assert names == ["merges.txt", "vocab.env", "vocab.txt"]
    assert list((tmp_path / "out").iterdir()) == []


def test_code_is_taken_only_if_the_user_agreed_to_run_it(model: Path, tmp_path: Path) -> None:
    (model / "modeling_x.py").write_text("class X: ...")
    for trust in (False, True):
        out = tmp_path / f"out-{trust}"
        out.mkdir()
        prepare_base(
            out, kind="hf", path=str(model), trust_remote_code=trust,
            log_path=tmp_path / "base.log", log=LOG,
        )  # fmt: skip
        assert (out / "modeling_x.py").is_file() is trust


def test_every_problem_of_a_folder_is_told_at_once(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "model-00001-of-00002.safetensors").unlink()
    second = model / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="2 more") as caught:
        _prepare(model, tmp_path)
    text = "\n".join(caught.value.details)
    for named in ("tokenizer", "model-00001-of-00002.safetensors", second.name):
        assert named in text
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_model_is_refused(model: Path, tmp_path: Path) -> None:
    for path in (None, "/nowhere/at/all", "no-such-org/no-model"):
        with pytest.raises(ConfigError, match=r"model\.path"):
            prepare_base(tmp_path, kind="hf", path=path, log_path=tmp_path / "log", log=LOG)
    for path in model.glob("*.safetensors*"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="pytorch_model.bin"):
        _prepare(model, tmp_path)
    shutil.rmtree(tmp_path / "out")
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="adapter"):
        _prepare(model, tmp_path)


def test_data_files_become_the_dataset(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.csv", tmp_path / "held.csv"
    train.write_text("question,answer\na,1\nb,2\nc,\n")
    held_out.write_text("question,answer\nd,4\n")
    out = tmp_path / "out"
    out.mkdir()
    report = prepare_data(
        out, kind="csv", path=str(train), eval_path=str(held_out), messages_key=None,
        prompt_key="question", response_key="answer", on_bad_line="skip", log=LOG,
    )  # fmt: skip
    rows = [json.loads(line)["messages"] for line in (out / "train.jsonl").read_text().splitlines()]
    assert [[m["content"] for m in messages] for messages in rows] == [["a", "1"], ["b", "2"]]
    assert report.kind == "dataset"
    assert all(check.ok for check in report.checks)
    assert {name: value for name, value in report.metrics.items() if value} == {
        "data/train_read": 3.0, "data/train_kept": 2.0, "data/train_refused": 1.0,
        "data/heldout_read": 1.0, "data/heldout_kept": 1.0,
    }  # fmt: skip
    assert json.loads((out / "dataset.json").read_text())["splits"]["train"]["refused"] == 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kind": "jsonl"}, r"data\.path"),
        ({"kind": "hub"}, r"data\.name"),
        ({"kind": "jsonl", "path": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"kind": "toy", "chat_template": "/nowhere.jinja"}, r"data\.chat_template"),
        ({"kind": "toy", "train_size": 10**6}, "1000000"),
    ]
    for options, named in refused:
        with pytest.raises(DataError, match=named):
            prepare_data(tmp_path, log=LOG, **options)


def test_the_identity_of_a_source_changes_with_its_files(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("one")
    before = source_identity(kind="jsonl", path=str(path))
    assert before == source_identity(kind="jsonl", path=str(path))
    path.write_text("three")
    assert source_identity(kind="jsonl", path=str(path)) != before
    before, stat = source_identity(kind="jsonl", path=str(path)), path.stat()
    time.sleep(0.02)  # the kernel's clock for ctimes ticks every 10 ms or faster
    path.write_text("seven")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert source_identity(kind="jsonl", path=str(path)) != before
    assert len(source_identity(kind="hf", path=str(model))) == 5
    assert source_identity(kind="hf", path="org/name") == {}
    assert source_identity(kind="toy") == {}


def test_a_connection_that_breaks_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies close connections: the user reads the key to change, not a library's traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with_hub_at(monkeypatch, tmp_path / "hub", server.getsockname()[1])
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with pytest.raises(ConfigError, match="model.path=owner/name"):
            resolve_model("owner/name")
        thread.join()


def test_a_hub_id_is_found_in_the_local_cache_and_examined(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layout the hub's library keeps, with no network: `HF_HUB_OFFLINE` is set in tests."""
    with_hub(monkeypatch, tmp_path / "hub", {"owner/name": {"model_type": "qwen2"}})
    folder = resolve_model("owner/name")
    assert folder.parent.name == "snapshots"
    with pytest.raises(ConfigError, match="model.path=owner/other"):
        resolve_model("owner/other")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (tmp_path / "out").mkdir()
    settings: dict[str, Any] = {"kind": "hf", "path": "owner/name", "examine": require_sound}
    with pytest.raises(ConfigError, match="ARCHITECTURE"):
        prepare_base(tmp_path / "out", log_path=tmp_path / "log", log=LOG, **settings)
