"""Bytes are split into lines, wherever they are cut and whatever they contain."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.process.output import Output

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def split(chunks: list[bytes]) -> list[str]:
    output = Output(stage="s", log=logging.getLogger(), log_path=Path(os.devnull))
    with output:
        return [line for chunk in [*chunks, b""] for line in output.split(chunk)]


@given(TEXT, st.lists(st.integers(0, 240), max_size=8))
@example("10 %\r20 %\n", [6])
@example("00\r\x80", [4])
def test_where_the_bytes_are_cut_does_not_matter(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[a:b] for a, b in pairwise(edges) if a < b]
    assert split(chunks) == split([data] if data else [])


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))))
def test_plain_lines_come_out_as_they_went_in(lines: list[str]) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    assert split([data] if data else []) == lines


def test_what_a_child_says_is_logged_and_what_its_libraries_print_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import logging; from tasks.core.events import emit, say, send_warnings\n"
        "print('Loading\\x1b[31m shards: 100%'); send_warnings(); say('waiting for a build')\n"
        "logging.getLogger('tasks.training').warning('made again: %s', 'x'); emit('step', step=1)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    log = logging.getLogger("test.process")
    with (
        caplog.at_level(logging.INFO),
        Output(stage="train", log=log, log_path=tmp_path / "x.log") as output,
    ):
        assert list(output.feed(done.stdout)) == [{"event": "step", "step": 1}]
    logged = [(record.levelname, record.message) for record in caplog.records]
    assert logged == [("INFO", "[train] waiting for a build"), ("WARNING", "[train] made again: x")]
    lines = ["Loading shards: 100%", "waiting for a build", "made again: x"]
    assert (tmp_path / "x.log").read_text().splitlines() == lines
    assert output.tail == lines
