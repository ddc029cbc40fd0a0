"""`--help`, names of other tools, and a Python without the libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.config import CONF, SCHEMAS, vocabulary
from flows.cli.entry import run_main
from flows.cli.peer_names import PEERS, translate
from flows.cli.usage import experiment_line, setting_help
from flows.cli.vocabulary import experiments
from tests.conftest import PROJECT

PROGRAMS = sorted(SCHEMAS)


def shown(capsys: pytest.CaptureFixture[str], program: str, *words: str) -> str:
    assert run_main(program, lambda *_: 7, argv=list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_every_setting(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, program, "--help")
    assert f"python flows/{program}.py" in text.splitlines()[2]
    listed = re.findall(r"^  ([a-z_.]+[a-z0-9_]*)=", text, flags=re.M)
    assert set(listed) >= set(vocabulary(program).settings)


def test_help_has_every_experiment_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "rlhf", "-h").splitlines()
    assert len(experiments(CONF)) > 20
    for name in experiments(CONF):
        (line,) = [line for line in lines if line.split()[:1] == [f"+exp={name}"]]
        assert line.endswith(experiment_line(CONF / "exp" / f"{name}.yaml"))
    headings = [line for line in lines if line.startswith("Experiments in ")]
    assert len(headings) == len({Path(name).parent for name in experiments(CONF)})


def test_help_shows_values_of_the_command_line_and_narrows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, "rlhf", "+exp=grpo", "rl.ppo_epochs=3", "--help", "rl", "train.lr")
    assert re.search(r"^  rl.num_generations=8 +.*\(a whole number\)$", text, flags=re.M)
    assert "  rl.ppo_epochs=3 " in text
    assert "  train.lr=" in text
    assert "\n  train.epochs=" not in text
    assert "Experiments" not in text


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_has_help(program: str) -> None:
    names = vocabulary(program)
    assert [key for key in names.settings if not setting_help(key, names)] == []


def test_help_of_a_setting_is_its_comment() -> None:
    names = vocabulary("rlhf")
    assert setting_help("train.min_lr_ratio", names).startswith("last lr over lr")
    assert setting_help("data.answer_key", names).startswith("prompts: column with")
    assert setting_help("train.optimizer", names).startswith("AdamW")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_peers_name_leads_to_settings_that_exist(program: str) -> None:
    names = vocabulary(program)
    assert PEERS[program]
    for peer in PEERS[program]:
        assert not names.has(peer), f"{peer} is a name of ours"
        for override in translate(program, peer, "x").split(" "):
            key, equals, value = override.partition("=")
            if not equals:
                continue  # within <...>
            assert names.has(key), override
            plain = value in names.groups.get(key, ()) or value[:1] in "<x" or value == "zerox"
            assert plain or not names.is_section(key), override


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_the_libraries_gets_one_line(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(PROJECT / "flows" / f"{program}.py"), "source=x"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.search(r"has no \w+; type: ", line), line
    assert line.endswith(f"/.venv/bin/python {PROJECT}/flows/{program}.py source=x")
