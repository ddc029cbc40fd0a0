"""Bases and training outputs, made once per session; tests copy one before they alter it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.drift.fingerprint import PROFILES
from tasks.gather import gather
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tests.weights.making import NF4, Here, Spread, make_base, write_trained


@pytest.fixture(scope="session")
def log() -> logging.Logger:
    return logging.getLogger("tests.weights")


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
def mixture_adapter(shop: Path, mixture_run: Path, mixture: Artifact, log: logging.Logger) -> Path:
    return _published(shop / "mixture-adapter", mixture_run, mixture, log)


@pytest.fixture(scope="session")
def qlora_run(shop: Path, qwen: Artifact) -> Path:
    return write_trained(shop / "qlora-run", qwen, Spread(quantization=NF4))


@pytest.fixture(scope="session")
def full_run(shop: Path, qwen: Artifact) -> Path:
    return write_trained(shop / "full-run", qwen, Spread(full=True, world_size=4))


def _published(root: Path, run: Path, base: Artifact, log: logging.Logger) -> Path:
    with staging(root) as work:
        report = gather(
            work, trained=run, base=base.path, scorer=Here(), profile=PROFILES["standard"], log=log
        )
        assert [check for check in report.checks if not check.ok] == []
        publish(work, root, Origin(report.kind, "gather", root.name))
    return root


@pytest.fixture(scope="session")
def lora_adapter(shop: Path, lora_run: Path, llama: Artifact, log: logging.Logger) -> Path:
    return _published(shop / "lora-adapter", lora_run, llama, log)


@pytest.fixture(scope="session")
def qlora_adapter(shop: Path, qlora_run: Path, qwen: Artifact, log: logging.Logger) -> Path:
    return _published(shop / "qlora-adapter", qlora_run, qwen, log)


@pytest.fixture(scope="session")
def full_weights(shop: Path, full_run: Path, qwen: Artifact, log: logging.Logger) -> Path:
    return _published(shop / "full-weights", full_run, qwen, log)
