"""`python flows/audit.py ...` as a user types it, from another working directory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.synthetic import make_sparse
from flows.commands.audit import MAX_MEMORY, bounded_memory
from tasks.core.errors import ConfigError
from tests.audit.making import adapter_tensors, make_adapter, make_model, tensors

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flows" / "audit.py"


@dataclass(frozen=True)
class Done:
    """Result of a finished command: exit code, output, CPU seconds, peak memory in MB."""

    code: int
    out: str
    err: str
    peak_mb: float


LAUNCHER = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(json.dumps([done.returncode, done.stdout, done.stderr, peak]))
"""
"""A child's peak memory includes its parent's at the fork, so a small process starts it."""


def run(cwd: Path, *overrides: str) -> Done:
    """Run the command in an empty folder; resources are those of this process alone."""
    cwd.mkdir(exist_ok=True)
    command = [sys.executable, "-c", LAUNCHER, sys.executable, str(PROGRAM), *overrides]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    assert not list(cwd.iterdir()), "the command wrote into the user's directory"
    return Done(*json.loads(done.stdout))


def test_a_broken_adapter_by_relative_path_as_json(tmp_path: Path) -> None:
    make_adapter(tmp_path / "it", {key: array[:0, 0] for key, array in adapter_tensors().items()})
    report = tmp_path / "report.json"
    done = run(tmp_path / "elsewhere", "source=../it", f"out={report}")
    assert done.code == 1, done.err
    document = json.loads(report.read_text())
    assert (document["kind"], document["ok"]) == ("adapter", False)
    empty = next(entry for entry in document["findings"] if entry["code"] == "EMPTY_TENSOR")
    assert empty["where"]["file"] == "adapter_model.safetensors"
    assert {"severity", "found", "expected", "why", "fix"} <= empty.keys()
    assert json.loads(run(tmp_path / "elsewhere", "source=../it", "out=-").out)["ok"] is False


def test_unusable_arguments(tmp_path: Path) -> None:
    make_model(tmp_path / "it")
    for overrides, message in (
        ([f"source={tmp_path}/it/config.json"], "config.json: is a file"),
        ([f"source={tmp_path}/it", f"base={tmp_path}/absent"], "absent: no such folder"),
        ([f"source={tmp_path}/it", f"out={tmp_path}/it/report.json"], "which is only read"),
        ([f"source={tmp_path}/it", "fix=true"], "out_dir="),
        (["vlues=true"], "values"),
    ):
        done = run(tmp_path / "elsewhere", *overrides)
        assert (done.code, "Traceback" in done.err) == (2, False), done.err
        assert message in done.err


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["fix=true", "out_dir=new"]])
def test_the_memory_limit(tmp_path: Path, more: list[str]) -> None:
    root = make_model(tmp_path / "it")
    count = 1_500_000  # below the limit on values, above the limit on memory
    table = ",".join(f'"{number}":""' for number in range(count))
    (root / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{table}}}}}')
    command = [sys.executable, "-c", LIMITED, str(256 << 20), sys.executable, str(PROGRAM)]
    done = subprocess.run(
        [*command, f"source={root}", *more], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert f"source={root}: needs more than 0.2 GiB to be looked at" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_memory_limit_ends_with_its_block() -> None:
    """With `prefect=true` the audit shares its process with the flow."""
    before, size = resource.getrlimit(resource.RLIMIT_AS), MAX_MEMORY + (1 << 30)
    np.empty(size, np.uint8)  # address space only, which is enough outside the limit
    with (
        pytest.raises(ConfigError, match=r"source=it: needs more than \d+\.\d GiB"),
        bounded_memory("it"),
    ):
        np.empty(size, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.slow
def test_neither_torch_nor_prefect_is_imported(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    heavy = ("torch", "transformers", "prefect", "mlflow", "vllm", "deepspeed", "peft")
    program = (
        "import atexit, runpy, sys\n"
        f"sys.argv = [{str(PROGRAM)!r}, {f'source={root}'!r}]\n"
        f"imported = lambda: [name for name in {heavy!r} if name in sys.modules]\n"
        "atexit.register(lambda: print('imported:', imported()))\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert "imported: []" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_hundred_shards_of_400_gb(tmp_path: Path) -> None:
    """Headers are read, not values: 200 MB are enough."""
    make_sparse(tmp_path / "base", tmp_path / "adapter")
    size = sum(path.stat().st_size for path in (tmp_path / "base").iterdir())
    assert size > 400e9
    done = run(tmp_path / "elsewhere", f"source={tmp_path / 'base'}")
    assert "100 files" in done.out
    assert "TENSOR_MISSING" not in done.out
    assert done.peak_mb < 200
    done = run(
        tmp_path / "elsewhere", f"source={tmp_path / 'adapter'}", f"base={tmp_path / 'base'}"
    )
    assert done.peak_mb < 200, done


def test_a_repaired_copy(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    (root / "model.safetensors").unlink()
    state = {f"module.{key}": torch.from_numpy(array) for key, array in tensors().items()}
    torch.save(state, root / "pytorch_model.bin")
    assert run(tmp_path / "elsewhere", f"source={root}").code == 1
    out = tmp_path / "new"
    done = run(tmp_path / "elsewhere", f"source={root}", "fix=true", f"out_dir={out}")
    assert done.code == 0, done.err
    assert "21 keys without wrapper prefixes" in done.err
    assert run(tmp_path / "elsewhere", f"source={out}", "values=true").code == 0
    again = run(tmp_path / "elsewhere", f"source={root}", "fix=true", f"out_dir={out}")
    assert (again.code, "is not empty" in again.err) == (2, True)
