"""Text of a checkpoint on its way to a terminal, a log or a report."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.terminal import STARTED, clean_logging, command, plain

HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\u202ee\x00\x7ff\rg\x85h\u2028i"


def test_a_text_is_not_rewritten_and_commands_are_as_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a prompt about python flows/audit.py"
    monkeypatch.delenv(STARTED, raising=False)
    assert (command("rlhf"), plain(text)) == ("python flows/rlhf.py", text)
    monkeypatch.setenv(STARTED, "1")
    monkeypatch.setattr("sys.argv", ["plumbline train"])
    assert (command("rlhf"), plain(text)) == ("plumbline train", text)


def test_what_is_left() -> None:
    for text, clean in (
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("caf\u00e9 \u4f60\u597d \U0001f600", "caf\u00e9 \u4f60\u597d \U0001f600"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "0;titletext"),
        ("\x1b\x1b[31m[31mtwice", "[31mtwice"),
        ("the end\x1b", "the end"),
        ("\ud800 half", "\ufffd half"),
        (HOSTILE, "ab0;titlecdefghi"),
    ):
        assert plain(text) == clean


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    clean = plain(text)
    assert {unicodedata.category(char) for char in clean if char not in "\n\t"} & {"Cc", "Cs"} == (
        set()
    )
    assert plain(clean) == clean
    clean.encode()


def test_log_records_of_every_logger(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        clean_logging()
        clean_logging()
        logging.getLogger("somebody.else").warning("tensor %s of %d", HOSTILE, 3)
        logging.getLogger("somebody.else").warning("tensor %s of %d", "a", 3)
        logging.LoggerAdapter(logging.getLogger("prefect.x"), {}).warning(HOSTILE)
    finally:
        logging.setLogRecordFactory(before)
    assert [record.getMessage() for record in caplog.records] == [
        f"tensor {plain(HOSTILE)} of 3", "tensor a of 3", plain(HOSTILE),
    ]  # fmt: skip
    assert caplog.records[1].args == ("a", 3)
