"""The command line: a user's mistakes are reported all at once, and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.tool import run
from tests.commands import environment
from tests.conftest import PROJECT
from tests.verify.serving import free_port


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def errors(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the lines of the refusal."""
    assert run("verify", words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_all_mistakes_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["url=host:8000", "source=absent", "out=no/report.json"]
    lines = errors(capsys, *words)
    assert lines[0] == "3 problems; nothing was verified"
    assert "-> url=http://host:8000" in lines[1]
    assert "source: absent; no such folder" in lines[2]
    assert [line.split(":")[0].strip() for line in lines[3:]] == ["out"]
    lines = errors(capsys, *words, "timeout_s=0", "workers=0", "profle=strict")
    keys = {line.split()[0].rstrip(":") for line in lines[1:]}
    assert keys == {"timeout_s", "workers", "profle", "url", "source", "out"}


def test_a_server_that_is_down_and_a_source_without_a_reference(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    lines = errors(capsys, "checkpoint", f"url={url}")
    assert lines[0] == "2 problems; nothing was verified"
    assert "plumbline_witness" in lines[1]
    assert lines[2].startswith(f"  url={url}: ")
    assert {path.name for path in place.iterdir()} == {"file", "checkpoint"}


def test_neither_torch_nor_prefect_is_imported(place: Path) -> None:
    program = (
        "import sys; from flows.cli.tool import main; main('verify');"
        "print(*sorted({'torch', 'transformers', 'prefect', 'mlflow', 'vllm'} & set(sys.modules)))"
    )
    words = [f"url=http://127.0.0.1:{free_port()}", "source=checkpoint"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment(PYTHONPATH=str(PROJECT)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert "2 problems" in done.stderr
