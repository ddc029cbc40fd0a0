"""Bases and training outputs, made once per session; tests copy one before they alter it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.pipeline.artifact import Artifact
from tests.weights.making import NF4, Spread, gathered, make_base, write_trained


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def llama(shop: Path) -> Artifact:
    return make_base(shop / "llama", "llama", max_shard_size="100KB")


@pytest.fixture(scope="session")
def qwen(shop: Path) -> Artifact:
    return make_base(shop / "qwen", "qwen")


@pytest.fixture(scope="session")
def lora_run(shop: Path, llama: Artifact) -> Path:
    return write_trained(shop / "lora-run", llama, Spread(world_size=3))


@pytest.fixture(scope="session")
def mixture(shop: Path) -> Artifact:
    return make_base(shop / "mixture", "mixtral")


@pytest.fixture(scope="session")
def mixture_run(shop: Path, mixture: Artifact) -> Path:
    spread = Spread(targets=["q_proj"], parameters=["experts.gate_up_proj", "experts.down_proj"])
    return write_trained(shop / "mixture-run", mixture, spread)


@pytest.fixture(scope="session")
def mixture_adapter(shop: Path, mixture_run: Path, mixture: Artifact) -> Path:
    return gathered(shop / "mixture-adapter", mixture_run, mixture)


@pytest.fixture(scope="session")
def qlora_run(shop: Path, qwen: Artifact) -> Path:
    return write_trained(shop / "qlora-run", qwen, Spread(quantization=NF4))


@pytest.fixture(scope="session")
def full_run(shop: Path, qwen: Artifact) -> Path:
    return write_trained(shop / "full-run", qwen, Spread(full=True, world_size=4))


@pytest.fixture(scope="session")
def lora_adapter(shop: Path, lora_run: Path, llama: Artifact) -> Path:
    return gathered(shop / "lora-adapter", lora_run, llama)


@pytest.fixture(scope="session")
def qlora_adapter(shop: Path, qlora_run: Path, qwen: Artifact) -> Path:
    return gathered(shop / "qlora-adapter", qlora_run, qwen)


@pytest.fixture(scope="session")
def full_weights(shop: Path, full_run: Path, qwen: Artifact) -> Path:
    return gathered(shop / "full-weights", full_run, qwen)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder for a stage."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
