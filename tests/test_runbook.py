"""docs/runbook.md has an entry for every alarm, and its commands exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.cli import entry
from flows.cli.arguments import read
from flows.cli.config import compose_config, vocabulary
from tasks.core import errors
from tasks.core.errors import PlumblineError
from tests.conftest import PROJECT

TEXT = (PROJECT / "docs" / "runbook.md").read_text()
FLAT = " ".join(TEXT.split())
PLACEHOLDER = re.compile(r"%\.?\d*[a-z]|\{[^}]*\}")
PASSED_ON = {
    "flows/orchestration/flow_run.py",  # what an outage has cost, of prefect_watch.py
    "tasks/process/output.py",  # a full disk
    "tasks/tracking/outbox.py",  # `report`: what waits
    "tasks/data/build.py",  # rows, below the line that counts them
    "tasks/rl/experience/experience_scoring.py",  # the mismatch that the correction handles
    "tasks/rl/rewards/http.py",  # the endpoint's own answer
    "tasks/training/engine/saving.py",  # a checkpoint's error, beside the one that ends the run
    "tasks/train.py",  # rows that are too long
}
"""Files with a warning whose whole text is made elsewhere."""


def subclasses(base: type[PlumblineError]) -> Iterator[type[PlumblineError]]:
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)


CLASSES = sorted(
    {each for each in subclasses(PlumblineError) if each.__module__ == errors.__name__},
    key=lambda each: each.__name__,
)


def warnings() -> Iterator[tuple[str, str]]:
    """Yield the file and the longest fixed part of every warning that a run or server can log."""
    for folder in ("flows", "tasks", "infra"):
        for path in sorted((PROJECT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if node.func.attr == "warning" and node.args:
                    yield str(path.relative_to(PROJECT)), fixed_part(node.args[0])


def fixed_part(message: ast.expr) -> str:
    texts = [message] if isinstance(message, ast.Constant) else list(ast.walk(message))
    parts = [
        part.strip(" :;,.-()[]")
        for text in texts
        if isinstance(text, ast.Constant)
        for part in PLACEHOLDER.split(str(text.value))
    ]
    return max(parts, key=len, default="")


def commands() -> list[str]:
    """Return the commands of all shell blocks, continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_has_an_entry(error: type[PlumblineError]) -> None:
    assert f"| `{error.__name__}` |" in TEXT


def test_every_exit_status_has_an_entry() -> None:
    statuses = {error.exit_code for error in [PlumblineError, *CLASSES]}
    statuses |= {0, entry.HUNG_UP, entry.INTERRUPTED, entry.TERMINATED}
    rows = {int(row) for row in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)}
    assert rows >= statuses


def test_every_alarm_of_prefect_has_an_entry() -> None:
    alarm = yaml.safe_load((PROJECT / "infra" / "servers" / "automations.yaml").read_text())
    states = {event.rpartition(".")[2] for event in alarm["trigger"]["expect"]}
    for state in {*states, "Cancelled", "Late", "AwaitingConcurrencySlot"}:
        assert f"| `{state}` |" in TEXT, state


def test_every_warning_has_an_entry() -> None:
    logged = list(warnings())
    assert len(logged) > 15
    missing = [
        (path, part)
        for path, part in logged
        if (not part and path not in PASSED_ON) or " ".join(part.split()) not in FLAT
    ]
    assert missing == []


def test_every_metric_has_an_entry() -> None:
    prometheus = pytest.importorskip("flows.monitoring.prometheus")
    names = {f"plumbline_{name}" for name in prometheus.GAUGES}
    names |= {f"plumbline_{name}_total" for name in prometheus.COUNTERS}
    assert [name for name in sorted(names) if f"`{name}`" not in TEXT] == []


def test_every_setting_exists() -> None:
    settings = compose_config([]).settings
    named = re.findall(r"`([a-z]+)\.([a-z_]+)(?:=[^`]*)?`", TEXT)
    keys = {(section, key) for section, key in named if section in settings}
    assert len(keys) > 5
    assert [f"{section}.{key}" for section, key in keys if key not in settings[section]] == []


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command: str) -> None:
    subprocess.run(["bash", "-n", "-c", command.replace("<", "").replace(">", "")], check=True)
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif program == "python" and words[1] != "-m":
        assert (PROJECT / words[1]).is_file()
        check_flow(Path(words[1]).stem, words[2:])
    elif program == "python":
        importlib.import_module(words[2])
    elif program == "prefect" and words[1:3] == ["deployment", "run"]:
        config = yaml.safe_load((PROJECT / "infra" / "prefect.yaml").read_text())
        assert words[3].partition("/")[2] in {entry["name"] for entry in config["deployments"]}


def check_flow(program: str, words: list[str]) -> None:
    """Compose the configuration of a command, with a word in place of `...`."""
    given = [word for word in words if word != "..."]
    arguments = read(given, vocabulary(program))
    compose_config(arguments.overrides, config_name=program)
