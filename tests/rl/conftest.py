"""A base for rollouts, and user code in its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tasks.rl.environment import EnvironmentProcess
from tasks.rl.rewards import Function
from tasks.rl.user_code import ENVIRONMENT, FunctionReference, UserCode
from tests.rl.making import LOG, Open
from tests.tiny import make_tokenizer, save_base


@pytest.fixture(scope="session")
def base32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with heads of 32, vLLM's smallest on a CPU; tied embeddings."""
    path = tmp_path_factory.mktemp("base32")
    return save_base(path, make_tokenizer(), hidden_size=128, intermediate_size=256)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a factory that writes a file and opens an environment, or a function, in it."""
    with ExitStack() as stack:

        def make(
            text: str, name: str = "Game", setting: str = ENVIRONMENT, *, timeout_s: float = 60.0
        ) -> UserCode:
            path, log_path = tmp_path / "judge.py", tmp_path / "output.log"
            path.write_text(text)
            kind = EnvironmentProcess if setting == ENVIRONMENT else Function
            reference = FunctionReference.of(f"{path}:{name}", setting)
            process = kind(reference, timeout_s=timeout_s, log=LOG, log_path=log_path)
            return stack.enter_context(closing(process))

        yield make
