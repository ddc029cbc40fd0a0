"""The GitHub Action, with its steps run as a runner runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.audit.making import make_model, tensors
from tests.commands import environment
from tests.conftest import PROJECT

ACTION = PROJECT / "infra" / "action" / "action.yml"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def action() -> dict[str, Any]:
    return dict(yaml.safe_load(ACTION.read_text()))


class Runner:
    """Runner of a composite action, without its network.

    Attributes:
        log: output of the steps.
        env: variables that steps have set for later ones.
    """

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder = folder
        known = action()["inputs"]
        self.inputs = {name: entry.get("default", "") for name, entry in known.items()} | inputs
        assert set(inputs) <= set(known)
        self.log, self.env, self.outputs = "", {}, {}  # type: ignore[var-annotated]
        self.summary = folder / "summary.md"

    def value(self, text: str) -> str:
        """Evaluate the expressions of a step's variable: `inputs.a`, or `inputs.a || inputs.b`."""

        def evaluate(match: re.Match[str]) -> str:
            names = [name.removeprefix("inputs.") for name in match[1].split(" || ")]
            return next((self.inputs[name] for name in names if self.inputs[name]), "")

        return EXPRESSION.sub(evaluate, text)

    def run(self, step: dict[str, Any]) -> int:
        """Run a step. Returns its exit status."""
        github = {
            name: self.folder / name.lower()
            for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")
        }
        self.summary = github["GITHUB_STEP_SUMMARY"]
        own = {name: self.value(text) for name, text in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env=environment(
                **self.env, **own, **{name: str(path) for name, path in github.items()},
                GITHUB_ACTION_PATH=str(ACTION.parent), RUNNER_TEMP=str(self.folder),
            ),
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=250,
        )  # fmt: skip
        self.log += done.stdout
        for name, into in (("GITHUB_ENV", self.env), ("GITHUB_OUTPUT", self.outputs)):
            if github[name].is_file():
                into.update(line.split("=", 1) for line in github[name].read_text().splitlines())
        return done.returncode

    def gate(self) -> dict[str, int]:
        """Run all steps. Returns their exit statuses by name."""
        statuses: dict[str, int] = {}
        for step in action()["runs"]["steps"]:
            if step["name"] == "Audit" and self.inputs["audit"] == "none":
                continue
            if step["name"] == "Verify" and not self.inputs["url"]:
                continue
            statuses[step["name"]] = self.run(step)
            assert "Traceback" not in self.log, self.log
        return statuses


def test_a_broken_checkpoint_fails_the_job(tmp_path: Path) -> None:
    source = make_model(
        tmp_path / "my 'model'", {f"module.{key}": array for key, array in tensors().items()}
    )
    runner = Runner(tmp_path, source=str(source), python=sys.executable)
    assert runner.gate() == {"Python and its libraries": 0, "Audit": 1}
    assert "WRAPPER_RESIDUE" in runner.log
    assert "WRAPPER_RESIDUE" in runner.summary.read_text()
