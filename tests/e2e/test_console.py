"""A run on a terminal of 100 or 200 columns, and what stands on it at the end."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from flows.orchestration.progress import LONGEST_S, Progress
from tests.commands import environment
from tests.conftest import PROJECT

LINES = 30
NOISE = ("Triton", "NUMA", "safetensors checkpoint shards", "MISSING", "it/s]", "Traceback")


class Terminal:
    """The lines of a terminal, as far as rich uses it: text, new lines, erased and left lines."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif match := re.fullmatch(r"\x1b\[(\d*)A", part):
                self.row = max(0, self.row - int(match[1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif not part.startswith("\x1b"):
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)


def on_terminal(columns: int, *words: str) -> tuple[int, str]:
    """Run a command on a terminal. Returns its exit status and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    env = {**environment(), "TERM": "xterm-256color"}
    written = b""
    with subprocess.Popen(words, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            written += data
    os.close(ours)
    return process.returncode, written.decode(errors="replace")


@pytest.mark.slow  # a whole run
@pytest.mark.parametrize("columns", [100, 200])
def test_a_run_on_a_terminal(columns: int, tmp_path: Path) -> None:
    status, text = on_terminal(
        columns, sys.executable, str(PROJECT / "flows/rlhf.py"), "+exp=sft_qlora",
        f"paths.runs={tmp_path}",
        "model.steps=20", "train.epochs=1", "smoke.engine=transformers", "smoke.min_stop_rate=0",
        "smoke.max_degenerate_rate=1",
    )  # fmt: skip
    assert status == 0, text
    terminal = Terminal()
    terminal.feed(text)
    shown = "\n".join(terminal.lines)
    for number, name in enumerate(
        ("prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"), 1
    ):
        assert f"stage {number}/7 {name} " in text
    assert re.search(r"stage 3/7 train .*\d/\d+.* left.*loss [\d.]+", text)
    assert "stage " not in shown.split("\nstage  ")[0]  # the live line is gone
    assert not [word for word in NOISE if word in text]
    logged = [line for line in terminal.lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert len(logged) >= 5
    assert not [line for line in terminal.lines if re.match(r".?:?\d:\d\d ", line)]  # none is cut
    table = shown[shown.index("\nstage  ") :]
    assert max(len(line) for line in table.split("served model:")[0].splitlines()) <= columns
    assert re.search(r"^merge .* KL \d\.\de-\d\d  nats  <= 1\.0e-03  ok  weights/", table, re.M)
    assert [line.split(":")[0] for line in table.strip().splitlines()[-3:]] == [
        "next", "pages", "report",
    ]  # fmt: skip


class _Kept:
    """A log, and a record of a stage, that keep what they get."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *values: object) -> None:
        self.lines.append(text % values)

    def metrics(self, values: object, step: int = 0, at: int | None = None) -> None: ...


def test_lines_of_a_log_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("flows.orchestration.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    kept = _Kept()
    told = Progress(kept, kept)  # type: ignore[arg-type]
    told({"event": "plan", "steps": 36_000})
    numbers = {f"phase_{number}_seconds": 1.23456789 for number in range(40)}
    for step in range(1, 36_001):  # ten hours
        now[0] += 1.0
        told({"event": "step", "step": step, "loss": 1 / 3, "kl": 0.01, "reward": 2.0, **numbers})
    assert 36_000 / LONGEST_S <= len(kept.lines) <= 700
    assert max(map(len, kept.lines)) <= 160
    hour = next(line for line in kept.lines if line.startswith("step 18"))
    assert re.fullmatch(
        r"step 18\d*/36000: loss 0\.3333, reward 2, kl 0\.01, \d+:\d\d:\d\d left", hour
    )
    assert kept.lines[-1] == "step 36000/36000: loss 0.3333, reward 2, kl 0.01"
