"""The locks: complete, hashed, and consistent with the project."""

from __future__ import annotations

import re
import tomllib

from tests.conftest import PROJECT

REQUIREMENTS = PROJECT / "requirements"
EXTRAS = {
    "cpu": ("train", "serve-cpu"), "cuda": ("train", "serve"), "gate": (), "dev": ("dev",),
    "lm-eval": ("lm-eval",),
}  # fmt: skip
"""Extras of pyproject.toml by the lock that has their pins."""
PINNED = ("build", "cpu", "cuda", "gate", "quantize", "tools", "torch")
HASHED = re.compile(r"^[A-Za-z0-9._-]+==\S+(?: ; .+?)?(?:\s+--hash=sha256:[0-9a-f]{64})+$")


_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)")


def normal(name: str) -> str:
    """Return a name in the spelling of the locks."""
    return re.sub(r"[-_.]+", "-", name).lower()


def logical_lines(name: str) -> list[str]:
    """Return the lines of a file, with joined continuations, without comments."""
    text = (REQUIREMENTS / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def pins(lines: list[str]) -> dict[str, str]:
    """Name -> version of every line that pins one."""
    matches = (_PIN.match(line) for line in lines)
    return {normal(match[1]): match[2] for match in matches if match}


def lock(name: str) -> dict[str, str]:
    """Return name -> version of a lock."""
    return pins(logical_lines(f"{name}.lock"))


def wanted(name: str) -> dict[str, str]:
    """Return name -> version of the pins that a lock is made of."""
    own = pins(logical_lines(f"{name}.in")) if (REQUIREMENTS / f"{name}.in").is_file() else {}
    if name not in EXTRAS:
        return own
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = [*(line for extra in EXTRAS[name] for line in project["optional-dependencies"][extra])]
    left_out = {"torch"} if name == "cpu" else set()
    return {k: v for k, v in pins([*project["dependencies"], *lines]).items() if k not in left_out}


def test_a_lock_is_hashed_and_holds_what_its_source_asks_for() -> None:
    for path in sorted(REQUIREMENTS.glob("*.lock")):
        lines = logical_lines(path.name)
        assert lines
        assert [line for line in lines if not HASHED.match(line)] == [], path
        required = wanted(path.stem)
        profile = {} if path.stem in PINNED else lock("cpu")  # which these go on top of
        locked = profile | lock(path.stem)
        assert {package: locked.get(package) for package in required} == required, path
