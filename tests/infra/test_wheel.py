"""The wheel: packages and configuration together, usable where the checkout is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import PROJECT


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources, unpacked."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in ("conf", "flows", "tasks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
        + ["--no-build-isolation", "--wheel-dir", root, source],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = root.glob("plumbline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return root / "site"


def files(root: Path, *folders: str) -> set[str]:
    """Return the Python and YAML files in these folders, relative to the root."""
    paths = (path for folder in folders for path in (root / folder).rglob("*"))
    return {str(p.relative_to(root)) for p in paths if p.suffix in (".py", ".yaml")}


def test_it_holds_all_code_and_all_configuration(unpacked: Path) -> None:
    expected = files(PROJECT, "conf", "flows", "tasks")
    assert "conf/exp/recipes/qwen3-8b/sft_qlora.yaml" in expected
    assert files(unpacked, "conf", "flows", "tasks") == expected
    assert (unpacked / "flows" / "report" / "report.html.jinja").is_file()
    top = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"conf", "flows", "tasks"}


def test_its_command_composes_an_experiment_outside_the_checkout(
    unpacked: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, unpacked / "flows" / "rlhf.py", "+exp=qlora", "--cfg", "job"],
        cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "quant_type: nf4" in done.stdout
