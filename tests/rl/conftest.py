"""A tiny base and prompts for it, shared by the tests of whole online runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.training.conftest import make_tokenizer, save_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("online-base"), make_tokenizer())


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts without answers; the reward counts the letter e in a response."""
    path = tmp_path_factory.mktemp("online-data")
    draw = random.Random(0)
    for split, count in (("train", 40), ("heldout", 6)):
        rows = []
        for number in range(count):
            word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 6)))
            messages = [{"role": "user", "content": f"say {word}"}]
            rows.append({"id": f"{split}{number}", "messages": messages, "columns": {"word": word}})
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "reward.py").write_text(
        "def score(completions, word, **_):\n"
        "    return [len(c[0]['content'].encode()) / 10 + len(w) / 100\n"
        "            for c, w in zip(completions, word)]\n"
    )
    return path
