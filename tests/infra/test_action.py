"""The steps of the GitHub Action, run as a runner runs them, without its network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.audit.making import make_model, tensors
from tests.commands import environment
from tests.conftest import PROJECT

FOLDER = PROJECT / "infra" / "action"


def test_a_broken_checkpoint_fails_the_job(tmp_path: Path) -> None:
    wrapped = {f"module.{key}": array for key, array in tensors().items()}
    source = make_model(tmp_path / "my 'model'", wrapped)
    setup, audit, _ = yaml.safe_load((FOLDER / "action.yml").read_text())["runs"]["steps"]
    github = {name: str(tmp_path / name) for name in ("GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
    env = environment(**github, GITHUB_ACTION_PATH=str(FOLDER), RUNNER_TEMP=str(tmp_path))

    def run(step: dict[str, str], **inputs: str) -> subprocess.CompletedProcess[str]:
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        return subprocess.run(
            bash, env=env | inputs, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    assert run(setup, GATE_PYTHON=sys.executable).returncode == 0
    name, _, python = Path(github["GITHUB_ENV"]).read_text().strip().partition("=")
    audited = run(audit, GATE_FOLDER=str(source), **{name: python})
    assert audited.returncode == 1
    for text in (audited.stdout, Path(github["GITHUB_STEP_SUMMARY"]).read_text()):
        assert "WRAPPER_RESIDUE" in text
