"""`plumbline audit` as a user types it: reports, mistakes, limits, repairs, and recorded runs."""

from __future__ import annotations

import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import make_sparse
from flows.cli.entry import run_main
from flows.commands import audit as audit_command
from tasks.core.errors import ConfigError
from tests.audit.making import (
    adapter_tensors,
    make_adapter,
    make_model,
    merge,
    tensors,
    wrapped,
)
from tests.commands import command, environment, run_in_empty, tracked_run

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Typed:
    """Run the command in this process, in an empty folder; returns status, output and errors."""
    cwd = tmp_path / "elsewhere"
    cwd.mkdir()
    monkeypatch.chdir(cwd)

    def run(*words: str) -> tuple[int, str, str]:
        status = run_main("audit", audit_command._job, argv=list(words))
        assert not list(cwd.iterdir()), "the command wrote into the user's directory"
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_broken_adapter_by_relative_path_as_json(tmp_path: Path, typed: Typed) -> None:
    make_adapter(tmp_path / "it", {key: array[:0, 0] for key, array in adapter_tensors().items()})
    report = tmp_path / "report.json"
    assert typed("source=../it", f"out={report}")[0] == 1
    document = json.loads(report.read_text())
    assert (document["kind"], document["ok"]) == ("adapter", False)
    empty = next(entry for entry in document["findings"] if entry["code"] == "EMPTY_TENSOR")
    assert empty["where"]["file"] == "adapter_model.safetensors"
    assert {"severity", "found", "expected", "why", "fix"} <= empty.keys()
    assert json.loads(typed("source=../it", "out=-")[1])["ok"] is False


def test_unusable_arguments(tmp_path: Path, typed: Typed) -> None:
    root = make_model(tmp_path / "it")
    for words, thing in (
        ([f"source={root}/config.json"], "config.json"),
        ([f"source={root}", f"base={tmp_path}/absent"], "base="),
        ([f"source={root}", f"out={root}/report.json"], "out="),
        ([f"source={root}", "fix=true"], "out_dir="),
        ([f"source={root}", f"adapter={root}"], "values=true"),
        (["vlues=true"], "values"),
    ):
        status, _, errors = typed(*words)
        assert (status, thing in errors) == (2, True), errors


def test_the_command_proves_a_merge(tmp_path: Path, typed: Typed) -> None:
    base, adapter = make_model(tmp_path / "tiny"), make_adapter(tmp_path / "adapter")
    options = (f"base={base}", f"adapter={adapter}", "values=true")
    status, out, _ = typed(f"source={merge(tmp_path / 'good', 2.0)}", *options)
    assert (status, "MERGE_PROVEN" in out) == (0, True)
    assert re.search(r"\b4 tensors.*\b17\b", out)
    status, out, _ = typed(f"source={merge(tmp_path / 'wrong', 4.0)}", *options)
    assert (status, "MERGE_TWICE" in out) == (1, True)


def test_a_repaired_copy(tmp_path: Path, typed: Typed) -> None:
    import torch

    root, out = make_model(tmp_path / "it"), tmp_path / "new"
    (root / "model.safetensors").unlink()
    state = {key: torch.from_numpy(array) for key, array in wrapped(tensors()).items()}
    torch.save(state, root / "pytorch_model.bin")
    assert typed(f"source={root}")[0] == 1
    status, _, errors = typed(f"source={root}", "fix=true", f"out_dir={out}")
    assert (status, "21 keys" in errors) == (0, True), errors
    assert typed(f"source={out}", "values=true")[0] == 0
    status, _, errors = typed(f"source={root}", "fix=true", f"out_dir={out}")
    assert (status, "out_dir" in errors) == (2, True)


def test_neither_torch_nor_prefect_is_imported(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny")
    heavy = ("torch", "transformers", "prefect", "mlflow", "vllm", "deepspeed", "peft")
    program = (
        "import sys; from flows.commands.audit import main; status = main()\n"
        f"print('imported:', [name for name in {heavy!r} if name in sys.modules])\n"
        "sys.exit(status)"
    )
    words = [f"source={base}", f"base={base}", "values=true"]
    project = str(Path(audit_command.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment(PYTHONPATH=project), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert "imported: []" in done.stdout, done.stdout + done.stderr


def test_the_memory_limit_ends_with_its_block() -> None:
    """With `prefect=true` the audit shares its process with the flow."""
    before, size = resource.getrlimit(resource.RLIMIT_AS), audit_command.MAX_MEMORY + (1 << 30)
    np.empty(size, np.uint8)  # address space only, which is enough outside the limit
    with pytest.raises(ConfigError, match="source=it"), audit_command.bounded_memory("it"):
        np.empty(size, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


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
    words = command("audit", f"source={root}", *more)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(256 << 20), *words],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert f"source={root}" in done.stderr
    assert not (tmp_path / "new").exists()


LAUNCHER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""
"""A child's peak memory includes its parent's at the fork, so a small process starts it."""


@pytest.mark.slow
def test_a_hundred_shards_of_400_gb(tmp_path: Path) -> None:
    """Headers are read, not values: 200 MB are enough."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_sparse(base, adapter)
    assert sum(path.stat().st_size for path in base.iterdir()) > 400e9
    for words in ([f"source={base}"], [f"source={adapter}", f"base={base}"]):
        argv = [sys.executable, "-c", LAUNCHER, *command("audit", *words)]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert "TENSOR_MISSING" not in done.stdout
        assert int(done.stdout.rpartition("peak ")[2]) < 200, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)  # servers start
def test_prefect_and_mlflow_record_the_findings(tmp_path: Path) -> None:
    """The names in a checkpoint could be markup for a page."""
    arrays = wrapped(tensors())
    arrays["module.<b>|`x`</b>"] = arrays["module.lm_head.weight"][:0]
    broken, runs = make_model(tmp_path / "broken", arrays), tmp_path / "runs"
    (tmp_path / "elsewhere").mkdir()
    words = command("audit", f"source={broken}", "prefect=true", "tag=nightly")
    words += [f"paths.runs={runs}", f"out={tmp_path / 'report.json'}"]
    done = run_in_empty(tmp_path / "elsewhere", words, env=environment(), timeout=500)
    assert done.returncode == 1, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    codes = {finding["code"] for finding in report["findings"]}
    assert codes >= {"WRAPPER_RESIDUE", "EMPTY_TENSOR"}

    with sqlite3.connect(runs / "prefect" / "prefect.db") as database:
        query = "select state_type, parameters, id from flow_run where name = 'audit-nightly'"
        ((state, parameters, flow),) = database.execute(query).fetchall()
        query = f"select data from artifact where flow_run_id = '{flow}' and type = 'markdown'"
        ((table,),) = database.execute(query).fetchall()
    assert (state, f"source={broken}" in parameters) == ("COMPLETED", True)
    assert all(f"| {code} |" in table for code in codes)
    assert "`x`" not in table

    client, tracked = tracked_run(runs, flow)
    tags, metrics = tracked.data.tags, tracked.data.metrics
    assert (tags["audit.kind"], tags["audit.ok"]) == ("model", "false")
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert metrics["audit/errors"] == len(errors)
    assert metrics["finding/WRAPPER_RESIDUE"] == 1
    kept: dict[str, Any] = json.loads(
        Path(client.download_artifacts(tracked.info.run_id, "report.json")).read_text()
    )
    assert kept == report
