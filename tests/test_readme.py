"""README and guides are true: every command composes, every file and option they name exists."""

from __future__ import annotations

import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from flows.chain.steps import chain_steps
from flows.cli.arguments import apart
from flows.cli.config import compose_config
from tests.conftest import PROJECT

PAGES = (
    "README.md",
    "docs/training.md",
    "docs/online-rl.md",
    "docs/delivery.md",
    "docs/operations.md",
    "docs/verify.md",
)
TEXT = "\n".join((PROJECT / page).read_text() for page in PAGES)


def blocks() -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, flags=re.M | re.S)
    return [text.replace("\\\n", " ") for language, text in fenced if language == "sh"]


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks() for line in block.splitlines()]
    return [line for line in lines if line.startswith(("make ", "python ", ".venv/bin/"))]


def test_there_are_commands() -> None:
    assert len(commands()) >= 25


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.M))
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named
    assert named <= targets


def test_every_flow_command_composes() -> None:
    flows = [line for line in commands() if "flows/rlhf.py" in line]
    assert len(flows) >= 4
    for line in flows:
        words = line.split("flows/rlhf.py", 1)[1].split()
        if "--config-dir" in words:
            continue  # tests/config/test_entry.py composes it
        given = [w.strip("'\"") for w in words if not w.startswith("-") and w != "job"]
        overrides, _ = apart(given)
        # What a sweep tries one after the other is composed one after the other.
        for one in OverridesParser.create().parse_overrides(overrides):
            assert one.get_key_element()
        for choice in sweeps(overrides):
            chain_steps(compose_config(choice), [*choice, *apart(given)[1]])


def test_every_delivery_composes() -> None:
    deliveries = [line.split() for line in commands() if "flows/deliver.py" in line]
    assert len(deliveries) >= 3
    for _, _, *overrides in deliveries:
        compose_config(overrides, config_name="deliver")


def test_every_audit_composes() -> None:
    audits = [line.split() for line in commands() if "flows/audit.py" in line]
    assert len(audits) >= 2
    for _, _, *overrides in audits:
        compose_config(overrides, config_name="audit")


def test_every_verification_composes() -> None:
    questions = [line.split() for line in commands() if "flows/verify.py" in line]
    assert len(questions) >= 2
    for _, _, *overrides in questions:
        compose_config(overrides, config_name="verify")


def sweeps(overrides: list[str]) -> list[list[str]]:
    if not any("," in o and not o.split("=", 1)[1].startswith("[") for o in overrides):
        return [overrides]
    (swept,) = [o for o in overrides if "," in o]
    rest = [o for o in overrides if o != swept]
    key, values = swept.split("=", 1)
    return [[*rest, f"{key}={value}"] for value in values.split(",")]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_it_names_exists(page: str) -> None:
    text = (PROJECT / page).read_text()
    folders = "flows|tasks|conf|infra|docs|tests|requirements"
    named = {PROJECT / name for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)}
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    named |= {(PROJECT / page).parent / link for link in links}
    assert [path for path in named if not path.exists()] == []


def test_every_page_is_in_the_readme() -> None:
    """Guides, decisions, benchmarks and findings; the log is the lab's own."""
    readme = (PROJECT / "README.md").read_text()
    pages = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "docs").glob("*.md")}
    unlinked = {page for page in pages if f"({page})" not in readme}
    assert unlinked <= {"docs/log.md", "docs/benchmarks-gpu.md"}
