"""Signatures of a served folder: what breaks them, and what the upstream command says."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.chain.run_chain import check_signatures
from flows.chain.steps import chain_steps
from flows.cli.config import compose_config
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin, intact, open_artifact, publish, remember, verify
from tasks.pipeline.signature import PASSWORD, faults, is_signed, require_signed, sign
from tests.keys import make_pair

UPSTREAM = [str(Path(sys.executable).with_name("model_signing"))]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_pair(tmp_path / "keys")


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A published artifact with a file in a subfolder."""
    work, final = tmp_path / ".work", tmp_path / "served"
    (work / "deeper").mkdir(parents=True)
    (work / "weights.bin").write_bytes(bytes(range(256)))
    (work / "deeper" / "config.json").write_text("{}")
    publish(work, final, Origin("served", "convert", "k"))
    return final


@pytest.fixture
def signed(served: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, signed without a network."""

    def no_network(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert sign(served, keys[0])
    return served


def seen(folder: Path, key: Path) -> list[tuple[str, str]]:
    return [(fault.code, fault.file) for fault in faults(folder, key)]


def test_the_signature_covers_the_manifest_and_does_not_upset_it(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    artifact = open_artifact(signed, "served")
    assert verify(artifact) == faults(signed, keys[1]) == []
    remember(artifact, tmp_path / "seen")
    record = (tmp_path / "seen" / f"{artifact.digest}.json").read_text()
    (signed / "model.sig").unlink()
    assert intact(artifact, tmp_path / "seen") == []
    assert (tmp_path / "seen" / f"{artifact.digest}.json").read_text() == record
    sign(signed, keys[0])
    (signed / "manifest.json").write_text((signed / "manifest.json").read_text() + "\n")
    assert verify(open_artifact(signed)) == []  # a manifest cannot vouch for itself
    assert seen(signed, keys[1]) == [("SIGNED_CHANGED", "manifest.json")]


def _change(folder: Path) -> None:
    content = bytearray((folder / "weights.bin").read_bytes())
    content[100] ^= 1
    (folder / "weights.bin").write_bytes(content)


def _link(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "weights.bin")
    (folder / "weights.bin").symlink_to(folder.parent / "weights.bin")


def _git(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("")


ALTERED: dict[str, tuple[Callable[[Path], Any], list[tuple[str, str]]]] = {
    "one byte": (_change, [("SIGNED_CHANGED", "weights.bin")]),
    "removed": (lambda f: (f / "deeper" / "config.json").unlink(),
                [("SIGNED_REMOVED", "deeper/config.json")]),
    "added": (lambda f: (f / "more.py").write_text(""), [("SIGNED_ADDED", "more.py")]),
    "added deeper": (lambda f: (f / "deeper" / "model.sig").write_text(""),
                     [("SIGNED_ADDED", "deeper/model.sig")]),
    "a file that git reads": (_git, [("SIGNED_ADDED", ".git/config")]),
    "renamed": (lambda f: (f / "weights.bin").rename(f / "weights.new"),
                [("SIGNED_REMOVED", "weights.bin"), ("SIGNED_ADDED", "weights.new")]),
    "a link to the same bytes": (_link, [("SIGNED_ADDED", "weights.bin")]),
    "no signature": (lambda f: (f / "model.sig").unlink(), [("SIGNATURE_MISSING", "model.sig")]),
    "not JSON": (lambda f: (f / "model.sig").write_text("x"),
                 [("SIGNATURE_UNREADABLE", "model.sig")]),
    "another JSON": (lambda f: (f / "model.sig").write_text("{}"),
                     [("SIGNATURE_UNREADABLE", "model.sig")]),
    "deep JSON": (lambda f: (f / "model.sig").write_text("[" * 100_000),
                  [("SIGNATURE_UNREADABLE", "model.sig")]),
}  # fmt: skip


def test_an_altered_folder_is_named_with_its_file(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    wrong = {}
    for number, (name, (alter, expected)) in enumerate(ALTERED.items()):
        folder = tmp_path / f"copy-{number}" / "served"
        shutil.copytree(signed, folder)
        alter(folder)
        with pytest.raises(ArtifactError) as refused:
            require_signed(folder, keys[1])
        named = [tuple(line.split(":")[:2]) for line in refused.value.details]
        if seen(folder, keys[1]) != expected or named != [(c, f" {f}") for c, f in expected]:
            wrong[name] = named
    assert wrong == {}


def test_another_key_and_a_changed_statement_are_told_from_a_changed_file(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = make_pair(tmp_path / "keys", "other")
    assert seen(signed, other) == [("SIGNED_BY_ANOTHER", "model.sig")]
    bundle = json.loads((signed / "model.sig").read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"][0]["digest"] = "0" * 64
    text = json.dumps(statement).encode()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(text).decode()
    (signed / "model.sig").write_text(json.dumps(bundle))
    assert seen(signed, keys[1]) == [("SIGNED_BY_ANOTHER", "model.sig")]


def test_signing_again_changes_nothing_and_never_covers_a_change(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (signed / "model.sig").read_bytes()
    assert not sign(signed, keys[0])
    with pytest.raises(ArtifactError, match="SIGNED_BY_ANOTHER: model.sig"):
        sign(signed, make_pair(tmp_path / "keys", "other")[0])
    _change(signed)
    with pytest.raises(ArtifactError, match=r"SIGNED_CHANGED: weights\.bin") as refused:
        sign(signed, keys[0])
    assert f"rm {signed}/model.sig" in refused.value.hint
    assert (signed / "model.sig").read_bytes() == before
    (signed / "model.sig").unlink()
    private, public = make_pair(tmp_path / "keys", "hidden", password="pass phrase")
    monkeypatch.setenv(PASSWORD, "pass phrase")
    assert sign(signed, private)
    assert faults(signed, public) == []
    assert b"pass phrase" not in (signed / "model.sig").read_bytes()


def test_a_signed_reward_model_is_used_only_if_it_is_the_key_s(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    def check(public_key: Path) -> None:
        named = [f"reward.model={signed}", f"register.verify={public_key}"]
        overrides = ["+exp=grpo", "reward=model", *named]
        check_signatures(chain_steps(compose_config(overrides), overrides))

    _, other = make_pair(tmp_path / "keys", "other")
    check(keys[1])
    with pytest.raises(ArtifactError, match=r"SIGNED_BY_ANOTHER: model\.sig"):
        check(other)
    (signed / "model.sig").unlink()
    check(other)


def test_the_upstream_command_reads_our_signature_and_we_read_its(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    def upstream(*words: str) -> subprocess.CompletedProcess[str]:
        ends = [str(signed), "--signature", str(signed / "model.sig")]
        return subprocess.run([*UPSTREAM, *words, *ends], capture_output=True, text=True)

    check = ["verify", "key", "--public_key", str(keys[1])]
    done = upstream(*check)
    assert done.returncode == 0, done.stderr
    (signed / "model.sig").unlink()
    done = upstream("sign", "key", "--private_key", str(keys[0]))
    assert done.returncode == 0, done.stderr
    assert is_signed(signed)
    assert faults(signed, keys[1]) == []
    _git(signed)  # which the upstream command does not look at
    assert upstream(*check).returncode == 0
    assert seen(signed, keys[1]) == [("SIGNED_ADDED", ".git/config")]
