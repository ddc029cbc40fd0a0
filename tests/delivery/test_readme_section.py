"""The commands of docs/delivery.md, "Audit and repair", on such a checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import PROJECT
from tests.delivery.conftest import one_thread
from tests.delivery.dialects.saving import llamafactory_ppo
from tests.delivery.test_deliver import servable

TITLE = "## Audit and repair"
SECTION = (PROJECT / "docs" / "delivery.md").read_text().split(TITLE)[1].split("\n## ")[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", SECTION, flags=re.M | re.S)
COMMANDS = [
    line.split("  #")[0].split()
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
]
OUTPUTS = [text for language, text in BLOCKS if language == "text"]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a PPO run of LLaMA-Factory."""
    root = tmp_path_factory.mktemp("ckpt")
    policy = AutoModelForCausalLM.from_pretrained(servable(root / "base"))
    llamafactory_ppo(policy, root / "ppo")
    return root


def run(words: list[str], places: dict[str, Path], *more: str) -> tuple[int, str]:
    """Run a command of the page with other folders (`places`); return status and output."""
    python, program, *settings = words
    assert python == ".venv/bin/python"
    for told, place in places.items():
        settings = [re.sub(rf"={told}$", f"={place}", setting) for setting in settings]
    assert not any("=/ckpt" in setting or "=/served" in setting for setting in settings)
    done = subprocess.run(
        [sys.executable, str(PROJECT / program), *settings, *more],
        cwd=places["/ckpt/ppo"].parent, env=one_thread(), timeout=290,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def stages(output: str) -> list[str]:
    """Return the first word of each line of a run's table."""
    return re.findall(r"^(\w+) +\d+\.\d ", output, flags=re.M)


def test_it_is_audited_repaired_and_delivered(ckpt: Path, tmp_path: Path) -> None:
    look, fix, deliver = COMMANDS
    told, repaired, table = OUTPUTS
    new, served = tmp_path / "new", tmp_path / "served"
    places = {"/ckpt/ppo": ckpt / "ppo", "/ckpt/ppo-new": new, "/served/ppo": served}
    status, output = run(look, places)
    assert status == 1, output
    assert re.findall(r"^error +\w+", told, flags=re.M) == re.findall(
        r"^error +\w+", output, flags=re.M
    )
    status, output = run(fix, places)
    assert status == 0, output
    for line in repaired.splitlines()[1:]:
        assert line in output
    status, output = run(deliver, places, f"paths.runs={tmp_path / 'runs'}")
    assert status == 0, output
    assert stages(output) == stages(table) == ["audit", "convert"]
    assert (served / "model.safetensors").is_file()
    assert not list(served.glob("*head*"))
