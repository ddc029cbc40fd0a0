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
from tasks.pipeline.signature import (
    PASSWORD,
    is_signed,
    require_signed,
    sign,
    signature_problem,
)
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


def test_the_signature_covers_the_manifest_and_does_not_upset_it(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    artifact = open_artifact(signed, "served")
    assert verify(artifact) == []
    assert signature_problem(signed, keys[1]) == ""
    remember(artifact, tmp_path / "seen")
    record = (tmp_path / "seen" / f"{artifact.digest}.json").read_text()
    (signed / "model.sig").unlink()
    assert intact(artifact, tmp_path / "seen") == []
    assert (tmp_path / "seen" / f"{artifact.digest}.json").read_text() == record
    sign(signed, keys[0])
    (signed / "manifest.json").write_text((signed / "manifest.json").read_text() + "\n")
    assert verify(open_artifact(signed)) == []  # a manifest cannot vouch for itself
    assert "manifest.json" in signature_problem(signed, keys[1])


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


ALTERED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one byte": (_change, "weights.bin"),
    "removed": (lambda f: (f / "deeper" / "config.json").unlink(), "deeper/config.json"),
    "added": (lambda f: (f / "more.py").write_text(""), "more.py"),
    "added deeper": (lambda f: (f / "deeper" / "model.sig").write_text(""), "deeper/model.sig"),
    "a file that git reads": (_git, ".git/config"),
    "renamed": (lambda f: (f / "weights.bin").rename(f / "weights.new"), "weights.new"),
    "a link to the same bytes": (_link, "weights.bin"),
    "no signature": (lambda f: (f / "model.sig").unlink(), "model.sig"),
    "not JSON": (lambda f: (f / "model.sig").write_text("x"), "model.sig"),
    "another JSON": (lambda f: (f / "model.sig").write_text("{}"), ""),
    "deep JSON": (lambda f: (f / "model.sig").write_text("[" * 100_000), "model.sig"),
}
"""Ways to alter a signed folder, and the file that the error names."""


def test_an_altered_folder_is_refused_and_its_file_is_named(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    for number, (name, (alter, file)) in enumerate(ALTERED.items()):
        folder = tmp_path / f"copy-{number}" / "served"
        shutil.copytree(signed, folder)
        alter(folder)
        with pytest.raises(ArtifactError) as refused:
            require_signed(folder, keys[1])
        assert file in refused.value.message.removeprefix(str(folder)), name


def test_another_key_and_a_changed_statement_are_told_from_a_changed_file(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = make_pair(tmp_path / "keys", "other")
    assert "Key mismatch" in signature_problem(signed, other)
    bundle = json.loads((signed / "model.sig").read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"][0]["digest"] = "0" * 64
    text = json.dumps(statement).encode()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(text).decode()
    (signed / "model.sig").write_text(json.dumps(bundle))
    assert signature_problem(signed, keys[1])


def test_signing_again_changes_nothing_and_never_covers_a_change(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (signed / "model.sig").read_bytes()
    assert not sign(signed, keys[0])
    with pytest.raises(ArtifactError, match="Key mismatch"):
        sign(signed, make_pair(tmp_path / "keys", "other")[0])
    _change(signed)
    with pytest.raises(ArtifactError, match=r"weights\.bin") as refused:
        sign(signed, keys[0])
    assert f"rm {signed}/model.sig" in refused.value.hint
    assert (signed / "model.sig").read_bytes() == before
    (signed / "model.sig").unlink()
    private, public = make_pair(tmp_path / "keys", "hidden", password="pass phrase")
    monkeypatch.setenv(PASSWORD, "pass phrase")
    assert sign(signed, private)
    assert signature_problem(signed, public) == ""
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
    with pytest.raises(ArtifactError, match="Key mismatch"):
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
    assert signature_problem(signed, keys[1]) == ""
