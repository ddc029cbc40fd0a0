"""Passwords in texts."""

from __future__ import annotations

import pytest

from tasks.core.redaction import redact, with_passwords, without_passwords


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("postgresql://me:secret@db:5432/x", "postgresql://me:***@db:5432/x"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("https://secret@host/a", "https://***@host/a"),
        ("http://me:se@cret@host:1", "http://me:***@host:1"),
        ("http://:secret@host:1", "http://:***@host:1"),
        ("https://h/a?user=me&password=secret&x=1", "https://h/a?user=me&password=***&x=1"),
        ("to http://a:secret@h failed; http://b:secret@i", "to http://a:***@h failed; http://b:***@i"),
        ("hf://datasets/a/b@main", "hf://datasets/a/b@main"),
        ("models:/plumbline@candidate", "models:/plumbline@candidate"),
    ],
)  # fmt: skip
def test_urls_lose_their_passwords(text: str, hidden: str) -> None:
    assert redact(text) == hidden


def test_a_flow_of_this_process_gets_the_overrides_that_were_typed() -> None:
    typed = ["tracking.uri=http://me:secret@h", "train.lr=1"]
    recorded = without_passwords(typed)
    assert recorded == ["tracking.uri=http://me:***@h", "train.lr=1"]
    assert with_passwords(recorded) == typed
