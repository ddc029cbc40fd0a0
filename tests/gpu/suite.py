"""The list of checks, and how one is run: in a process of its own, with a time limit.

    python -m tests.gpu.suite CHECK DEVICE SIZE FOLDER

The process writes what it measured to `FOLDER/CHECK.json`. A process of its own, because a failed
CUDA kernel leaves its process unusable, and because every check starts with all of the GPU's
memory. This module imports nothing but the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TAIL = 60
"""Lines of a failed check's output that are shown."""
Numbers = Mapping[str, float | str]
"""Measurements of a check, which `test_gpu.py` prints."""


@dataclass(frozen=True)
class Setting:
    """Device and size of a check."""

    device: str  # cuda or cpu
    tiny: bool  # models of a hidden size of 64; on a GPU they have 1.5 B parameters
    folder: Path  # for models and results; checks of one session share it
    gpus: int = 1  # number of GPUs of the check; ranks, on a CPU


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str  # its function has the same name, with `_` for `-`
    module: str  # of the function, in this folder
    seconds: int  # estimate for an 80 GB GPU; three times as long ends it
    needs: tuple[str, ...]  # packages beside torch
    gib: int = 4  # GPU memory that it needs
    gpus: int = 1  # number of GPUs that it needs

    @property
    def run(self) -> Callable[[Setting], Numbers]:
        """The function."""
        module = importlib.import_module(f"tests.gpu.{self.module}")
        function: Callable[[Setting], Numbers] = getattr(module, self.name.replace("-", "_"))
        return function


HF = ("transformers",)
BNB = ("bitsandbytes",)
TRAIN = ("transformers", "peft", "deepspeed", "psutil")
QLORA = (*TRAIN, "bitsandbytes")
VLLM = ("transformers", "peft", "vllm", "psutil")
ALL = (*QLORA, "vllm", "prefect", "mlflow", "hydra")
CHECKS = (
    # in the order of importance
    Check("fork", "numerics", 30, VLLM),
    Check("engine", "engines", 150, VLLM, gib=24),
    Check("fingerprint", "numerics", 40, HF, gib=16),
    Check("nf4", "numerics", 15, BNB),
    Check("attention", "numerics", 40, HF, gib=16),
    Check("zero-lora", "training", 120, TRAIN, gib=24),
    Check("zero-full", "training", 150, TRAIN, gib=48),
    Check("zero-qlora", "training", 90, QLORA, gib=16),
    Check("resume", "training", 100, TRAIN, gib=16),
    Check("rollouts", "engines", 240, (*QLORA, "vllm"), gib=16),
    Check("demo", "training", 120, ALL, gib=16),
    Check("online", "training", 180, ALL, gib=16),
    Check("zero-ranks", "training", 240, TRAIN, gib=48, gpus=2),
    Check("rollouts-ranks", "engines", 240, (*QLORA, "vllm"), gib=16, gpus=2),
    Check("engine-parallel", "engines", 120, (*QLORA, "vllm"), gib=16, gpus=2),
)


def missing(check: Check) -> list[str]:
    """Packages that the check needs and this Python does not have."""
    return [name for name in ("torch", *check.needs) if importlib.util.find_spec(name) is None]


def run_apart(check: Check, setting: Setting) -> Numbers:
    """Run a check in a process of its own, and return its measurements.

    Raises AssertionError with the end of its output if it failed, or took too long.
    """
    log = setting.folder / f"{check.name}.log"
    size = "tiny" if setting.tiny else "real"
    command = [sys.executable, "-m", "tests.gpu.suite", check.name, setting.device, size]
    command += [str(setting.folder), str(setting.gpus)]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=PROJECT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as child,
    ):
        try:
            status: int | str = child.wait(3 * check.seconds)
        except subprocess.TimeoutExpired:
            status = f"no end after {3 * check.seconds} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
        raise AssertionError(f"{check.name}: {status}\n{tail}")
    numbers: Numbers = json.loads((setting.folder / f"{check.name}.json").read_text())
    return numbers


def main(arguments: list[str]) -> None:
    """Run one check in this process."""
    name, device, size, folder, gpus = arguments
    setting = Setting(device, size == "tiny", Path(folder), int(gpus))
    check = next(check for check in CHECKS if check.name == name)
    numbers = check.run(setting)
    (setting.folder / f"{name}.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
