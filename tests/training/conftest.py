"""A tiny real base (Qwen2, byte-level tokenizer, ChatML-like template) and data for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny import make_tokenizer, save_base

if TYPE_CHECKING:
    from tests.training.jobs import Trained
    from tests.training.online import Bench, Finished


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Qwen2 with hidden 64 and 2 layers, bf16, tied embeddings."""
    return save_base(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Path, tokenizer) -> Trained:
    """The jobs of `jobs.py`, by name."""
    from tests.training.jobs import Trained

    return Trained(tmp_path_factory.mktemp("trained"), dataset, tokenizer)


@pytest.fixture
def bench(trained: Trained, tmp_path: Path) -> Bench:
    """A folder for online runs."""
    return trained.bench(tmp_path)


@pytest.fixture(scope="session")
def finished(trained: Trained) -> Finished:
    """The online runs of the default suite."""
    return trained.online


@pytest.fixture(scope="session")
def finished_slowly(trained: Trained) -> Finished:
    """The online runs of slow tests alone."""
    from tests.training.online import SLOW, finish

    return finish(trained.bench(trained.folder / "online"), SLOW)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of `write_words`."""
    return write_words(tmp_path_factory.mktemp("dataset"))


def write_words(path: Path) -> Path:
    """Write 128 training and 17 evaluation samples: copy a word."""
    draw = random.Random(0)

    def row(i: int) -> dict[str, object]:
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 6)))
        turns = [("user", f"copy {word}"), ("assistant", word)]
        return {"id": f"s{i}", "messages": [{"role": r, "content": c} for r, c in turns]}

    for split, count in (("train", 128), ("heldout", 17)):
        lines = [json.dumps(row(i)) for i in range(count)]
        (path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return path
