"""`deliver register.sign=KEY`: OUT appears signed, and an altered OUT is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import open_artifact, verify
from tasks.pipeline.signature import faults
from tests.delivery.conftest import Done
from tests.keys import make_pair

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


def test_a_signed_folder_can_be_a_source(here: Run, base: Path, tmp_path: Path) -> None:
    private, _ = make_pair(tmp_path / "keys")
    assert here(f"source={base}", f"out={tmp_path / 'one'}", f"register.sign={private}").code == 0
    done = here(f"source={tmp_path / 'one'}", f"out={tmp_path / 'two'}", "convert.dtype=float16")
    assert done.code == 0, done.output
    assert "SIGNATURE_UNCHECKED" in [each["code"] for each in done.summary["findings"]]
    assert not (tmp_path / "two" / "model.sig").exists()
