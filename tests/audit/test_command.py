"""`plumbline audit` as a user types it: reports, mistakes, limits, repairs, and recorded runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import tool
from tasks.audit.run import audit
from tasks.core.terminal import STARTED
from tests.audit.making import adapter_tensors, make_adapter, make_model, tensors, wrapped

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
        status = tool.run("audit", words)
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


def test_a_repaired_copy(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    root, out = make_model(tmp_path / "a b,lr=1e-4"), tmp_path / "a b,lr=1e-4-repaired"
    (root / "model.safetensors").unlink()
    state = {key: torch.from_numpy(array) for key, array in wrapped(tensors()).items()}
    torch.save(state, root / "pytorch_model.bin")
    base = make_model(tmp_path / "the base", tensors(1))
    report = audit(root, base=base)
    program, command, *words = shlex.split(report.mending)
    assert (program, command, report.ok) == ("python", "flows/audit.py", False)
    assert f"base={base}" in words
    monkeypatch.setenv(STARTED, "1")
    assert shlex.split(audit(root, base=base).mending) == ["plumbline", "audit", *words]
    status, _, errors = typed(*words)
    assert (status, "21 keys" in errors) == (0, True), errors
    assert audit(out, values=True).ok
    status, _, errors = typed(*words)
    assert (status, "out_dir" in errors) == (2, True)
