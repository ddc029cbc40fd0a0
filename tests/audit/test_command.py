"""`plumbline audit` as a user types it: reports, mistakes, limits, repairs, and recorded runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.entry import run_main
from flows.commands import audit as audit_command
from tests.audit.making import (
    adapter_tensors,
    make_adapter,
    make_model,
    merge,
    tensors,
    wrapped,
)
from tests.commands import environment

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
