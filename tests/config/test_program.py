"""One program for all commands: `plumbline train`, `plumbline audit` and the others."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from flows import program
from flows.cli.config import CONF
from tests.audit.making import make_model
from tests.commands import environment
from tests.conftest import PROJECT


def plumbline(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `plumbline ...` as its script does, in a folder that is not the checkout."""
    start = f"import sys; sys.argv[0] = 'plumbline'; sys.path.insert(0, {str(PROJECT)!r}); "
    return subprocess.run(
        [sys.executable, "-P", "-c", start + "from flows.program import main; main()", *words],
        cwd=cwd, env=environment(), timeout=120, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_command_is_in_the_help_and_has_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["plumbline", "help"])
    with pytest.raises(SystemExit) as end:
        program.main()
    text = capsys.readouterr().out
    assert end.value.code == 0
    for command, module in program.COMMANDS.items():
        assert f"    plumbline {command} " in text + " "
        assert callable(import_module(f"flows.commands.{module}").main)


def test_the_list_has_every_experiment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["plumbline", "list"])
    with pytest.raises(SystemExit) as end:
        program.main()
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert len(lines) == len(list((CONF / "exp").rglob("*.yaml")))
    assert all(line.startswith("+exp=") and line.endswith(".") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audti", "x"], "there is no command 'audti' -> plumbline audit x"),
        (["fly"], "there is no command 'fly' -> plumbline help"),
        ([], "plumbline verify url=URL source=DIR"),
    ],
)
def test_a_command_that_does_not_exist(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["plumbline", *words])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_help_and_errors_name_what_was_typed(tmp_path: Path) -> None:
    made = plumbline(tmp_path, "audit", "source=none", "bsae=x")
    assert made.returncode == 2
    assert "plumbline audit" in plumbline(tmp_path, "audit").stderr
    assert "flows/" not in made.stderr
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    examined = plumbline(tmp_path, "audit", str(folder), "values=true")
    assert "python flows/" not in examined.stdout + examined.stderr
    assert examined.returncode in (0, 1)


def test_a_plan_starts_nothing(tmp_path: Path) -> None:
    made = plumbline(tmp_path, "plan", "+exp=sft_qlora", f"paths.runs={tmp_path / 'runs'}")
    assert made.returncode == 0, made.stderr
    assert "prepare_data  to run" in made.stdout
    assert not (tmp_path / "runs" / "artifacts").exists()
