"""Trainers and engines, each to its end: trained, delivered, served by a real vLLM, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.serving import serve
from tests.witness.conftest import train
from tests.witness.served import assert_delivered, verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp"])
def test_all_weights(sharding: str, base: Path, tmp_path: Path) -> None:
    """The server has the folder that was delivered, and the record of the folder that was not."""
    trained = train(base, tmp_path / "out", "full", sharding, ranks=2)
    print(sharding, assert_delivered(tmp_path, trained.out))
    with serve(tmp_path / "served", {}, log=tmp_path / "server.log") as server:
        status, text = verify(tmp_path, server.url, trained.out, "base")
        assert status == 0, text
        status, text = verify(tmp_path, server.url, trained.out / "checkpoint-1", "base")
        assert status == 1, text
