"""A base for rollouts, and environments in their processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tasks.rl.environment import EnvironmentProcess
from tasks.rl.user_code import FunctionReference
from tests.rl.making import LOG, Open
from tests.training.conftest import make_tokenizer, save_base


@pytest.fixture(scope="session")
def base32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with heads of 32, vLLM's smallest on a CPU; tied embeddings."""
    path = tmp_path_factory.mktemp("base32")
    return save_base(path, make_tokenizer(), hidden_size=128, intermediate_size=256)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a factory that writes a file and opens an environment in it."""
    with ExitStack() as stack:

        def make(text: str, *, timeout_s: float = 60.0) -> EnvironmentProcess:
            path, log_path = tmp_path / "game.py", tmp_path / "output.log"
            path.write_text(text)
            reference = FunctionReference.of(f"{path}:Game", "rl.environment")
            process = EnvironmentProcess(reference, timeout_s=timeout_s, log=LOG, log_path=log_path)
            return stack.enter_context(closing(process))

        yield make
