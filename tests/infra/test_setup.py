"""infra/setup.sh: which steps run when. The environment's interpreter and uv are recorders here,
since the real steps take minutes; `make test` itself has gone through them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.infra.requirements_files import PROJECT

RECORDER = """#!/usr/bin/env bash
echo "$*" >>"{log}"
[[ "$*" == *torch.lock* && "$*" != *--index-url* && -e "{log}.no-torch" ]] && exit 1
exit 0
"""


class Checkout:
    """A copy of what setup.sh reads, with recorders for the environment's interpreter and uv."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "calls.log"
        (root / "infra").mkdir()
        shutil.copy(PROJECT / "infra" / "setup.sh", root / "infra")
        shutil.copy(PROJECT / "pyproject.toml", root)
        shutil.copytree(PROJECT / "requirements", root / "requirements")
        python = root / ".venv" / "bin" / "python"
        self.uv = root / ".cache" / "tools" / "bin" / "uv"
        for program in (python, self.uv):
            program.parent.mkdir(parents=True)
            program.write_text(RECORDER.format(log=self.log))
            program.chmod(0o755)
        stamp = subprocess.check_output(["sha256sum", "requirements/tools.lock"], cwd=root)
        (root / ".cache" / "tools" / "stamp").write_bytes(stamp)

    def setup(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh; calls of the interpreter are in `calls()`."""
        self.log.write_text("")
        base = {k: v for k, v in os.environ.items() if k not in ("VENV", "PROFILE", "PYTHON")}
        return subprocess.run(
            [self.root / "infra" / "setup.sh", *args],
            env=base | env,
            cwd="/",
            check=False,
            capture_output=True,
            text=True,
        )

    def calls(self) -> list[str]:
        """Return the installed files in order: the last word of each installation."""
        return [line.split()[-1] for line in self.installs()]

    def installs(self) -> list[str]:
        """Return the arguments of each installation, by pip ("-m pip install") or uv."""
        return [line for line in self.log.read_text().splitlines() if " install " in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_steps_run_once_and_in_order(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    steps = ["build.lock", "torch.lock", "cpu.lock"]
    assert checkout.calls() == [*(f"requirements/{step}" for step in steps), "."]
    assert checkout.log.read_text().splitlines()[-1].startswith("-m compileall")
    again = checkout.setup()
    assert (again.returncode, again.stdout, checkout.log.read_text()) == (0, "", "")


def test_test_tools_come_on_top(checkout: Checkout) -> None:
    checkout.setup()
    assert checkout.setup("sign").returncode == 0
    assert checkout.calls() == ["requirements/sign.lock"]
    assert checkout.setup("dev").returncode == 0
    assert checkout.calls() == ["requirements/dev.lock"]
    refused = checkout.setup("test")
    assert (refused.returncode, checkout.calls()) == (1, [])
    assert "unknown argument test: nothing, sign, quantize, lm-eval, dev or tools" in refused.stderr


def test_llm_compressor_gets_an_environment_above_the_first_one(checkout: Checkout) -> None:
    checkout.setup()
    above = checkout.root / ".venv-quantize" / "bin" / "python"
    above.parent.mkdir(parents=True)
    packages = above.parents[1] / "packages"
    packages.mkdir()
    above.write_text(f"#!/usr/bin/env bash\necho {packages}\n")
    above.chmod(0o755)
    assert checkout.setup("quantize").returncode == 0
    assert checkout.calls()[-1] == "requirements/quantize.lock"
    installed = checkout.installs()[-1]
    assert installed.startswith("-m pip --python .venv-quantize/bin/python install")
    assert "--require-hashes" in installed
    assert (packages / "below.pth").is_file()
    assert checkout.setup("quantize").stdout == "", "the second call does nothing"


def test_an_edited_lock_is_installed_again_and_alone(checkout: Checkout) -> None:
    checkout.setup()
    with (checkout.root / "requirements" / "cpu.lock").open("a") as lock:
        lock.write("# edited\n")
    checkout.setup()
    assert checkout.calls() == ["requirements/cpu.lock"]


def test_everything_is_hash_checked_and_nothing_is_resolved(checkout: Checkout) -> None:
    checkout.setup("dev")
    calls = checkout.installs()
    assert len(calls) == 6
    for call in calls:
        assert "--no-deps" in call
        assert ("--require-hashes" in call) != call.endswith("--editable .")


def test_torch_falls_back_to_its_own_index(checkout: Checkout) -> None:
    Path(f"{checkout.log}.no-torch").touch()
    done = checkout.setup()
    assert done.returncode == 0
    tried = [line for line in checkout.log.read_text().splitlines() if "torch.lock" in line]
    assert ["--index-url" in call for call in tried] == [False, True]
    assert ["--require-hashes" in call for call in tried] == [True, True]
    assert "trying https://download.pytorch.org/whl/cpu" in done.stdout


def test_a_failed_step_is_tried_again(checkout: Checkout) -> None:
    programs = (checkout.root / ".venv" / "bin" / "python", checkout.uv)
    good = programs[0].read_text()
    for program in programs:
        program.write_text(good.replace("exit 0", '[[ "$*" == *cpu.lock* ]] && exit 3\nexit 0'))
    assert checkout.setup().returncode != 0
    for program in programs:
        program.write_text(good)
    assert checkout.setup().returncode == 0
    assert checkout.calls() == ["requirements/cpu.lock", "."]


def test_pip_tries_what_uv_cannot_get(checkout: Checkout) -> None:
    """pip may know a mirror that uv does not."""
    checkout.uv.write_text("#!/bin/sh\necho no such index >&2\nexit 2\n")
    done = checkout.setup(PIP_INDEX_URL="https://mirror/simple")
    assert done.returncode == 0
    assert "uv cannot install requirements/cpu.lock; trying pip" in done.stderr
    assert [line.split()[1] for line in checkout.installs() if "cpu.lock" in line] == ["pip"]


def test_the_last_lines_say_what_to_type(checkout: Checkout) -> None:
    assert "make demo" in checkout.setup().stdout
    assert checkout.setup().stdout == ""


def test_the_cuda_profile_needs_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.setup()
    refused = checkout.setup(PROFILE="cuda")
    assert refused.returncode == 1
    assert "holds profile cpu" in refused.stderr
    assert "make setup PROFILE=cuda VENV=.venv-cuda" in refused.stderr
    assert checkout.calls() == []


PYTHON = """#!/usr/bin/env bash
case "$*" in
*get_path*) echo {headers} ;;
"-m venv "*) mkdir -p "$3/bin" && cp {recorder} "$3/bin/python" ;;
esac
"""


@pytest.fixture
def fresh(checkout: Checkout, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Set-up without an environment yet, on a machine whose commands answer as told."""
    recorder = tmp_path / "recorder"
    (checkout.root / ".venv" / "bin" / "python").rename(recorder)
    shutil.rmtree(checkout.root / ".venv")
    tools, headers = tmp_path / "tools", tmp_path / "include"
    tools.mkdir()
    headers.mkdir()

    def setup(
        profile: str, *, header: bool = True, **told: str
    ) -> subprocess.CompletedProcess[str]:
        python = PYTHON.format(headers=headers, recorder=recorder)
        fine = {"uname": "echo x86_64", "getconf": "echo glibc 2.36", "gcc": "", "python": python}
        for name, script in {**fine, **told}.items():
            path = tools / name.replace("_", "-")
            path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        if header:
            (headers / "Python.h").touch()
        return checkout.setup(PROFILE=profile, PYTHON="python", PATH=f"{tools}:/usr/bin:/bin")

    return setup


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
@pytest.mark.parametrize(("machine", "glibc"), [("x86_64", "2.31"), ("aarch64", "2.34")])
def test_a_machine_that_the_wheels_are_for(fresh, profile: str, machine: str, glibc: str) -> None:
    done = fresh(profile, uname=f"echo {machine}", getconf=f"echo glibc {glibc}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"setup: {profile}" in done.stdout


REFUSED = {
    "another machine": ({"uname": "echo ppc64le"}, "there are no wheels for ppc64le"),
    "old glibc": ({"getconf": "echo glibc 2.28"}, "need glibc 2.31 on x86_64 (Ubuntu 22.04"),
    "old glibc on Arm": (
        {"uname": "echo aarch64", "getconf": "echo glibc 2.31"}, "need glibc 2.34 on aarch64"),
    "no glibc": ({"getconf": "exit 1"}, "this system has no glibc"),
    "no Python.h": ({"header": False}, "Python.h is not there: apt-get install python3-dev"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_machine_is_refused_before_any_download(
    fresh, checkout: Checkout, name: str
) -> None:
    machine, message = REFUSED[name]
    done = fresh("cuda", **machine)
    assert done.returncode == 1
    assert message in done.stderr
    assert checkout.calls() == []


def test_an_old_driver_is_a_warning(fresh) -> None:
    done = fresh("cuda", nvidia_smi="echo 550.54.15")
    assert done.returncode == 0
    assert "driver here is 550.54.15, and CUDA 13 needs 580 or newer" in done.stderr
    for fine in ("echo 580.65.06", "echo NVIDIA-SMI has failed; exit 9"):
        shutil.rmtree(Path(done.args[0]).parents[1] / ".venv")
        assert fresh("cuda", nvidia_smi=fine).stderr == ""


def test_without_a_new_enough_python_it_says_so(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".venv")
    refused = checkout.setup(PYTHON="no-such-python")
    assert refused.returncode == 1
    assert "no Python 3.11 to 3.14 among: no-such-python" in refused.stderr
