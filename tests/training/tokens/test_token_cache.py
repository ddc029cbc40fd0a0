"""Splits are tokenised once, and again if anything changes or is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tasks.training.tokens.example_spec import CONVERSATIONS
from tasks.training.tokens.examples import damage
from tests.training.datasets import answer, data_events, job_for, load, user, write

ROWS = [{"id": f"s{i}", "messages": [user(f"q{i}"), answer("x" * (i % 7 + 1))]}
        for i in range(300)]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_an_entry_is_made_once_and_again_after_changes(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, ROWS)
    job = job_for(tmp_path, base)
    first, second = load(job, CONVERSATIONS), load(job, CONVERSATIONS)
    assert np.array_equal(first.ids, second.ids)
    load(job_for(tmp_path, base, max_len=63), CONVERSATIONS)
    load(job_for(tmp_path, base, mask="every_token"), CONVERSATIONS)
    load(job_for(tmp_path, base, batch={"on_overlong": "refuse"}), CONVERSATIONS)
    load(job_for(tmp_path, base, seed=5, probes=1), CONVERSATIONS)  # they play no part
    write(tmp_path, ROWS[:-1])
    load(job, CONVERSATIONS)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    load(job, CONVERSATIONS)
    cached = [event["cached"] for event in data_events(capfd)]
    assert cached == [False, True, *[False] * 3, True, False, False]


def test_a_damaged_entry_is_noticed_and_made_again(base: Path, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    job = job_for(tmp_path, base)
    good = np.array(load(job, CONVERSATIONS).ids)
    (entry,) = (tmp_path / "tokens").iterdir()

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)

    for name, break_file in (
        ("ids.i32", flip),
        ("ids.i32", lambda path: os.truncate(path, path.stat().st_size - 4)),
        ("bears.u8", lambda path: path.unlink()),
        ("examples.json", lambda path: path.write_text("{")),
    ):
        break_file(entry / name)
        assert damage(entry), name
        assert np.array_equal(load(job, CONVERSATIONS).ids, good), name
        assert not damage(entry), name
