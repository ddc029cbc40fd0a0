"""The locks hold what the project asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import PROJECT

FOLDER = PROJECT / "requirements"
EXTRAS = {
    "cpu": ("train", "serve-cpu"), "cuda": ("train", "serve"), "dev": ("dev",), "gate": (),
    "lm-eval": ("lm-eval",),
}  # fmt: skip
"""Extras of pyproject.toml by the lock that has their pins, as `lock.sh` asks for them."""
BELOW = {"cpu": "torch", "dev": "cpu", "lm-eval": "cpu"}
"""Locks that are installed on top of another."""


def lock(name: str) -> dict[str, str]:
    """Return name -> version of a lock."""
    return dict(re.findall(r"^([^ #=]+)==([^ ]+)", (FOLDER / f"{name}.lock").read_text(), re.M))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.lock")), ids=lambda path: path.stem)
def test_a_lock_holds_what_its_source_asks_for(path: Path) -> None:
    source = path.with_suffix(".in")
    lines = re.findall(r"^[^#\n]+", source.read_text(), re.M) if source.is_file() else []
    if path.stem in EXTRAS:
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        lines += [*project["dependencies"], *(n for e in EXTRAS[path.stem] for n in extras[e])]
    below = lock(BELOW[path.stem]) if path.stem in BELOW else {}
    pins, wanted = below | lock(path.stem), [Requirement(line) for line in lines]
    names = [canonicalize_name(each.name) for each in wanted]
    assert set(names) - {*pins} == set()
    assert names
    for name, each in zip(names, wanted, strict=True):
        assert each.specifier.contains(pins[name]), name
