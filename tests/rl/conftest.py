"""A tiny base and prompts for it, shared by the tests of whole online runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.rl.environment.process import EnvironmentProcess
from tasks.rl.rewards.reference import FunctionReference
from tests.rl.environment.playing import LOG, Open
from tests.rl.online import DEFAULT, REWARDS, SLOW, Bench, Finished, finish
from tests.training.conftest import make_tokenizer, save_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("online-base"), make_tokenizer())


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with heads of 32, vLLM's smallest on a CPU, that writes short responses untrained.

    Of its 259 tokens 161 end a response: all but those of plain text and of the chat template.
    """
    path, tokenizer = tmp_path_factory.mktemp("chatty-base"), make_tokenizer()
    save_base(path, tokenizer, hidden_size=128, intermediate_size=256)
    kept = tokenizer("\n ", add_special_tokens=False)["input_ids"]
    ends = [i for i in range(94, 257) if i not in kept]
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    return path


@pytest.fixture(scope="session")
def base32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with heads of 32, vLLM's smallest on a CPU; tied embeddings."""
    path = tmp_path_factory.mktemp("base32")
    return save_base(path, make_tokenizer(), hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts without answers, reward functions and an environment for them."""
    path = tmp_path_factory.mktemp("online-data")
    draw = random.Random(0)
    for split, count in (("train", 40), ("heldout", 6)):
        rows = []
        for number in range(count):
            word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 6)))
            messages = [{"role": "user", "content": f"say {word}"}]
            rows.append({"id": f"{split}{number}", "messages": messages, "columns": {"word": word}})
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in REWARDS.items():
        (path / f"{name}.py").write_text(
            f"calls = []\ndef score(completions, word, **_):\n    {body}\n"
        )
    (path / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, word):\n"
        "        self.left = len(word) - 1\n"
        "    def step(self, text):\n"
        "        self.left -= 1\n"
        "        return f'{self.left} left', len(text) / 10, self.left == 0\n"
    )
    return path


@pytest.fixture
def bench(tmp_path: Path, base: Path, chatty: Path, data: Path) -> Bench:
    return Bench(tmp_path, {"base": base, "chatty": chatty}, data)


@pytest.fixture(scope="session")
def shared_bench(
    tmp_path_factory: pytest.TempPathFactory, base: Path, chatty: Path, data: Path
) -> Bench:
    """A folder for the runs that several tests read."""
    return Bench(tmp_path_factory.mktemp("online"), {"base": base, "chatty": chatty}, data)


@pytest.fixture(scope="session")
def finished(shared_bench: Bench) -> Finished:
    """The runs of the default suite."""
    return finish(shared_bench, DEFAULT)


@pytest.fixture(scope="session")
def finished_slowly(shared_bench: Bench) -> Finished:
    """The runs of slow tests alone."""
    return finish(shared_bench, SLOW)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Return a factory that writes a file and opens an environment in it."""
    processes: list[EnvironmentProcess] = []

    def make(text: str, *, timeout_s: float = 60.0) -> EnvironmentProcess:
        path = tmp_path / "game.py"
        path.write_text(text)
        reference = FunctionReference.of(f"{path}:Game", "rl.environment")
        process = EnvironmentProcess(
            reference, timeout_s=timeout_s, log=LOG, log_path=tmp_path / "output.log"
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.close()
