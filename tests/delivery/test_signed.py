"""`deliver register.sign=KEY push=REPO`: OUT is signed and pushed; an altered OUT is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import open_artifact, verify
from tasks.pipeline.signature import faults
from tests.delivery.conftest import Done
from tests.keys import make_pair
from tests.release.hub import TOKEN, hub_on_loopback

Run = Callable[..., Done]


@pytest.mark.slow
def test_a_delivered_folder_is_signed(here: Run, base: Path, tmp_path: Path) -> None:
    private, public = make_pair(tmp_path / "keys")
    out = tmp_path / "out"
    arguments = [f"source={base}", f"out={out}"]
    plain = here(*arguments)
    assert plain.code == 0, plain.output
    assert not (out / "model.sig").exists()

    done = here(*arguments, f"register.sign={private}")  # only signed
    assert done.code == 0, done.output
    assert f"sign: with {private}" in done.output
    assert faults(out, public) == []
    assert verify(open_artifact(out, "served")) == []

    before = (out / "model.sig").read_bytes()
    again = here(*arguments, f"register.sign={private}")
    assert again.code == 0, again.output
    assert (out / "model.sig").read_bytes() == before

    new = tmp_path / "new"
    done = here(f"source={base}", f"out={new}", f"register.sign={private}")
    assert done.code == 0, done.output
    assert faults(new, public) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    weights = bytearray((new / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (new / "model.safetensors").write_bytes(weights)
    altered = here(f"source={base}", f"out={new}", f"register.sign={private}")
    assert altered.code == 1, altered.output
    assert "SIGNED_CHANGED: model.safetensors" in altered.output

    private.chmod(0o644)
    refused = here(f"source={base}", f"out={tmp_path / 'third'}", f"register.sign={private}")
    assert refused.code == 2
    assert f"register.sign: {private} has mode 0644" in refused.output
    assert not (tmp_path / "third").exists()


@pytest.mark.slow
def test_a_delivered_folder_is_pushed_with_its_signature(
    deliver: Run, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = make_pair(tmp_path / "keys")
    out = tmp_path / "out"
    words = [f"source={adapter}", f"base={base}", f"out={out}", "merge.base=original"]
    words += ["push=me/model", f"register.sign={private}"]
    with hub_on_loopback() as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", "hf_AnotherAnotherAnother")
        refused = deliver(*words, engine="transformers")
        assert refused.code == 2, refused.output
        assert "refuses the token (401)" in refused.output
        assert "hf_Another" not in refused.output
        assert not out.exists()

        monkeypatch.setenv("HF_TOKEN", TOKEN)
        done = deliver(*words, engine="transformers")
    assert done.code == 0, done.output
    assert f"pushed: {hub.url}/me/model commit 00000000" in done.output
    assert done.summary["pushed"]["commit"] == f"{1:040d}"
    pushed = {path: content for path, content in hub.files.items() if path != ".gitattributes"}
    assert pushed == {file.name: file.read_bytes() for file in out.iterdir()}
    assert "model.sig" in pushed
    assert TOKEN not in done.output


def test_a_signed_folder_can_be_a_source(here: Run, base: Path, tmp_path: Path) -> None:
    private, _ = make_pair(tmp_path / "keys")
    assert here(f"source={base}", f"out={tmp_path / 'one'}", f"register.sign={private}").code == 0
    done = here(f"source={tmp_path / 'one'}", f"out={tmp_path / 'two'}", "convert.dtype=float16")
    assert done.code == 0, done.output
    assert "SIGNATURE_UNCHECKED" in [each["code"] for each in done.summary["findings"]]
    assert not (tmp_path / "two" / "model.sig").exists()
