"""One program for all commands: `plumbline train`, `plumbline audit` and the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flows import program
from flows.cli.config import CONF
from flows.cli.vocabulary import experiments
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


@pytest.fixture
def typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run `plumbline ...` in this process; return exit status, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plumbline", *words])
        with pytest.raises(SystemExit) as end:
            program.main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


def test_every_command_is_in_the_help_and_has_a_module(typed: Any) -> None:
    status, text, _ = typed("help")
    assert status == 0
    for command, module in program.COMMANDS.items():
        assert f"    plumbline {command} " in text
        assert callable(import_module(f"flows.commands.{module}").main)


def test_the_list_has_every_experiment(typed: Any) -> None:
    status, text, _ = typed("list")
    assert status == 0
    listed = [line.split()[0] for line in text.splitlines() if line.endswith(".")]
    assert listed == [f"+exp={name}" for name in experiments(CONF)]
    status, text, _ = typed("list", "recipes", "dpo")
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert listed == [f"+exp={n}" for n in experiments(CONF) if "recipes" in n and "dpo" in n]
    assert "plumbline plan +exp=NAME" in text
    assert "no experiment has cat in its name" in typed("list", "cat")[1]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["audti", "x"], "there is no command 'audti' -> plumbline audit x"),
        (["fly"], "there is no command 'fly' -> plumbline help"),
        ([], "plumbline verify url=URL source=DIR"),
    ],
)
def test_a_command_that_does_not_exist(words: list[str], answer: str, typed: Any) -> None:
    status, _, errors = typed(*words)
    assert status == 2
    assert answer in errors


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
