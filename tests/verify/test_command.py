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


def test_all_mistakes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["url=host:8000", "source=absent", "out=no/report.json"]
    assert run("verify", words) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "3 problems; nothing was verified"
    assert "-> url=http://host:8000" in lines[0]
    assert [line.split(":")[0].strip() for line in lines] == ["url", "source", "out"]
    assert run("verify", [*words, "timeout_s=0", "workers=0", "profle=strict"]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    keys = {line.split()[0].rstrip(":") for line in lines}
    assert keys == {"timeout_s", "workers", "profle", "url", "source", "out"}


def test_a_server_that_is_down_and_a_source_without_a_reference(tmp_path: Path) -> None:
    """Both are reported; neither torch nor Prefect nor half of the product is imported for it."""
    program = (
        "import sys; from flows.cli.tool import main; main('verify');"
        "print(*sorted({'torch', 'transformers', 'prefect', 'mlflow', 'vllm'} & set(sys.modules)));"
        "print(sum(name.split('.')[0] in ('flows', 'tasks') for name in sys.modules))"
    )
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-c", program, f"url={url}", f"source={tmp_path}"], cwd=tmp_path,
        env=environment(PYTHONPATH=str(PROJECT)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    heavy, ours = done.stdout.splitlines()
    assert (done.returncode, heavy, int(ours) <= 70) == (0, "", True), done.stdout + done.stderr
    first, source, server, *_ = done.stderr.splitlines()
    assert first == "2 problems; nothing was verified"
    assert "plumbline_witness" in source
    assert server.startswith(f"  url={url}: ")
    assert not list(tmp_path.iterdir())
