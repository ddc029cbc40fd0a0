"""Read requirements/: names, versions and hashes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[2]
REQUIREMENTS = PROJECT / "requirements"

_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)")


def normal(name: str) -> str:
    """Return a name in the spelling of the locks."""
    return re.sub(r"[-_.]+", "-", name).lower()


def logical_lines(path: Path) -> list[str]:
    """Requirement lines: with joined continuations, without comments and blank lines."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def pins(lines: list[str]) -> dict[str, str]:
    """Name -> version of every line that pins one."""
    matches = (_PIN.match(line) for line in lines)
    return {normal(match[1]): match[2] for match in matches if match}


def lock(name: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return name -> version of a lock; with `environment` only what its markers select there."""
    lines = logical_lines(REQUIREMENTS / f"{name}.lock")
    if environment is not None:
        requirements = [Requirement(line.split(" --hash", 1)[0]) for line in lines]
        lines = [
            str(requirement)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate(dict(environment))
        ]
    return pins(lines)


def wanted(name: str) -> dict[str, str]:
    """Return name -> version of the pins of an .in file."""
    return pins(logical_lines(REQUIREMENTS / f"{name}.in"))
