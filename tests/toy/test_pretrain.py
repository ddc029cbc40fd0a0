"""The toy base is a Hugging Face folder; the same seed gives the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.core.events import parse
from tasks.toy.tokenizer import SPECIAL_TOKENS
from tasks.weights.files.folder import inspect_checkpoint
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow  # `tests/e2e/test_chain.py` trains one and goes on with it
STEPS = 3


def _make(root: Path) -> tuple[Path, list[dict[str, Any]]]:
    out = root / "base"
    out.mkdir(parents=True)
    job = root / "job.json"
    job.write_text(json.dumps({"out": str(out), "steps": STEPS, "seed": 5}))
    argv = [sys.executable, "-m", "tasks.toy", str(job)]
    done = subprocess.run(argv, cwd=PROJECT, check=True, capture_output=True, text=True)
    events = [event for line in done.stdout.splitlines() if (event := parse(line))]
    return out, events


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    return _make(tmp_path_factory.mktemp("toy"))


def test_the_same_seed_gives_the_same_bytes(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    again, events = _make(tmp_path)
    assert [event["event"] for event in events] == ["progress", "pretrained"]
    assert (events[0]["step"], events[0]["total"]) == (STEPS, STEPS)
    first = {path.name: path.read_bytes() for path in made[0].iterdir()}
    assert {path.name: path.read_bytes() for path in again.iterdir()} == first


def test_the_folder_is_complete_and_its_ids_agree(made: tuple[Path, list[dict[str, Any]]]) -> None:
    from transformers import AutoTokenizer

    inspected = inspect_checkpoint(made[0])
    assert inspected.problems == []
    assert all(check.ok for check in inspected.checks)
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert [tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS] == [0, 1, 2, 3]
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((made[0] / name).read_text())
        assert (settings["eos_token_id"], settings["pad_token_id"]) == (2, 3)
    for text in (
        "Reverse: k a t o",
        "na\u00efve 123 \u2028 \u65e5\u672c\u8a9e \U0001f642\n\ttabs",
        "",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_prompt_of_a_chat_is_a_prefix_of_the_chat(
    made: tuple[Path, list[dict[str, Any]]],
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made[0])
    question = [{"role": "user", "content": "Count the letters: k a t o"}]
    answer = {"role": "assistant", "content": "4"}
    start = tokenizer.apply_chat_template(
        question, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    whole = tokenizer.apply_chat_template([*question, answer], tokenize=True, return_dict=False)
    assert whole[: len(start)] == start
    assert tokenizer.decode(whole[len(start) :]) == " 4<|im_end|>"
