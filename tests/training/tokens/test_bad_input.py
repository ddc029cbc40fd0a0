"""Data that cannot be trained on is refused with the row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.errors import DataError
from tasks.training.tokens.example_spec import CONVERSATIONS, PAIRS
from tests.training.datasets import answer, job_for, load, pair, user, write

SILENT = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'user' %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Forgets what the assistant says."""


@pytest.mark.parametrize("roles", [CONVERSATIONS, PAIRS], ids=["sft", "pairs"])
def test_a_template_that_leaves_no_trainable_token(
    base: Path, tmp_path: Path, roles: tuple[str, ...]
) -> None:
    chats = [{"id": f"s{i}", "messages": [user("q"), answer("yes")]} for i in range(3)]
    pairs = [pair(f"s{i}", "q", "good", "bad") for i in range(3)]
    write(tmp_path, pairs if roles == PAIRS else chats)
    (tmp_path / "chat_template.jinja").write_text(SILENT)
    with pytest.raises(DataError, match="3 samples cannot be used, first s0: no train") as caught:
        load(job_for(tmp_path, base), roles)
    why = "no trainable token: the chat template leaves nothing of the answer"
    assert caught.value.details == tuple(f"s{i}: {why}" for i in range(3))
    assert "data.chat_template=" in caught.value.hint
    assert not list((tmp_path / "tokens").iterdir())


@pytest.mark.parametrize("rule", ["truncate", "refuse"])
def test_all_samples_are_longer_than_the_context(base: Path, tmp_path: Path, rule: str) -> None:
    """Prompts alone fill `train.max_len`, so truncation leaves no answer."""
    write(tmp_path, [pair(f"s{i}", "q" * 80, "good", "bad") for i in range(3)])
    with pytest.raises(DataError) as caught:
        load(job_for(tmp_path, base, batch={"on_overlong": rule}), PAIRS)
    what = {"truncate": "3 samples cannot be used, first s0: prompt of",
            "refuse": "none of 3 samples is left: 3 too long"}  # fmt: skip
    assert what[rule] in caught.value.message
    assert len(caught.value.details) == 3
    assert "train.max_len=" in caught.value.hint
