"""Trainers and engines, each to its end: trained, delivered, served by a real vLLM, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.delivery.peers import make_place
from tests.verify.serving import serve
from tests.witness.conftest import train
from tests.witness.served import assert_delivered, assert_served, deliver, verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
ADAPTERS = {
    "sft": ("sft", "", 1),
    "dpo": ("dpo", "", 1),
    "grpo": ("grpo", "", 1),
    "zero2": ("lora", "zero2", 2),
    "zero3": ("lora", "zero3", 2),
    "fsdp": ("lora", "fsdp", 2),
}
"""Kind of training, sharding and ranks by the name under which the adapter is served."""


def test_adapters(base: Path, tmp_path: Path) -> None:
    """One server has all adapters beside their base, which is in bf16 as most are."""
    published = make_place(tmp_path / "place", base) / "base"
    folders = {}
    for name, (kind, sharding, ranks) in ADAPTERS.items():
        folders[name] = train(published, tmp_path / name, kind, sharding, ranks=ranks).out
        print(name, assert_delivered(tmp_path, folders[name], f"base={published}"))
    assert_served(tmp_path, published, folders)


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


def test_a_reward_model_has_the_same_scores_in_vllm(base: Path, tmp_path: Path) -> None:
    """A server returns no log-probabilities of it: the delivery's own measurement proves it."""
    trained = train(base, tmp_path / "out", "reward")
    status, text = deliver(tmp_path, trained.out, f"base={base}", "smoke.engine=vllm")
    assert status == 0, text
    assert "witness: " in text
