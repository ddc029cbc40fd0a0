"""A user's mistakes are reported all at once; no command loads what it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.tool import run
from tests.audit.making import make_model
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


def test_a_server_that_is_down_and_a_source_without_a_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are reported."""
    url = f"http://127.0.0.1:{free_port()}"
    assert run("verify", [f"url={url}", f"source={tmp_path}"]) == 2
    _, source, server, *_ = capsys.readouterr().err.splitlines()
    assert "plumbline_witness" in source
    assert server.startswith(f"  url={url}: ")
    assert not list(tmp_path.iterdir())


TOOL = "from flows.cli.tool import main; main(sys.argv.pop(1))"
HEAVY = {"torch", "transformers", "prefect", "mlflow", "vllm", "deepspeed", "peft", "hydra"}
OF_TRAINING = {"tasks.rl", "tasks.training", "tasks.toy", "tasks.prepare"}
LOADED: dict[str, tuple[str, list[str], set[str], int]] = {
    # program, words, what it does not use, the most modules of ours
    "audit --help": (TOOL, ["audit", "--help"], HEAVY, 70),
    "audit": (TOOL, ["audit", "source=tiny", "base=tiny", "values=true"], HEAVY, 100),
    "verify": (TOOL, ["verify", "url=http://127.0.0.1:9", "source=tiny"], HEAVY, 70),
    "deliver": (
        "import flows.delivery.run_delivery", [], {"torch", "prefect", "mlflow"} | OF_TRAINING, 165
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_a_command_loads_nothing_that_it_does_not_use(name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    program, words, unused, most = LOADED[name]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)", *words],
        env=environment(PYTHONPATH=str(PROJECT)), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    loaded = done.stdout.splitlines()[-1].split()
    assert unused & {*loaded} == set()
    assert sum(module.split(".")[0] in ("flows", "tasks") for module in loaded) <= most
