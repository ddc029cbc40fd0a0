"""Pickles and remote code: found without running them."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.audit.run import audit
from tests.audit.making import by_code, codes, errors, make_model, tensors
from tests.weights.pickled.corpus import cases


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_a_state_dict_inside_a_trainers_checkpoint(key: str, tmp_path: Path) -> None:
    import torch

    root = make_model(tmp_path / "it")
    (root / "model.safetensors").unlink()
    state = {name: torch.from_numpy(array) for name, array in tensors().items()}
    torch.save({key: state, "epoch": 3, "optimizer": {}}, root / "pytorch_model.bin")
    report = audit(root)
    assert errors(by_code(report)) == {"NESTED_STATE_DICT"}
    assert "BIN_NOT_PLAIN" not in by_code(report)
    (finding,) = (finding for finding in report.findings if finding.code == "NESTED_STATE_DICT")
    assert f"{key!r}" in finding.fix or f'"{key}"' in finding.fix
    if key == "model":
        command = shlex.split(finding.fix)
        subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
        assert errors(codes(root)) == set()


def test_every_file_is_judged_by_its_content(tmp_path: Path) -> None:
    hostile = pickle.dumps(Hostile(tmp_path / "ran"), 4)
    for number, name in enumerate((".metadata", "notes.txt", "model-00001.safetensors", "a/b.x")):
        root = make_model(tmp_path / str(number))
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(hostile)
        assert codes(root)["PICKLE_CALLS"] == "error", name


def test_the_last_of_many_files_is_judged(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    for number in range(40):
        (root / f"a{number:02d}.pkl").write_bytes(pickle.dumps([number]))
    (root / "z.pkl").symlink_to("z")
    (root / "z").write_bytes(pickle.dumps(Hostile(tmp_path / "ran"), 4))
    hostile = [finding for finding in audit(root).findings if finding.code == "PICKLE_CALLS"]
    assert [(finding.file, finding.found) for finding in hostile] == [
        ("z", "posix.system"), ("z.pkl", "posix.system")
    ]  # fmt: skip


def test_a_file_that_cannot_be_scanned_is_an_error(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    (root / "extra.pkl").write_bytes(pickle.dumps([1, 2, 3], 4)[:-3])
    (finding,) = (item for item in audit(root).findings if item.code == "PICKLE_OPAQUE")
    assert (finding.severity.value, finding.file) == ("error", "extra.pkl")


AUDIT_HOOKED = """
import json, pickle, sys
from pathlib import Path
from tasks.audit.run import audit
events = []
calls = ("os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect")
sys.addaudithook(lambda event, args: events.append(event) if event in calls else None)
findings = audit(Path(sys.argv[1])).findings
during = list(events)
pickle.loads(b"cbuiltins\\nlen\\n.")
print(json.dumps({
    "during": during, "after": events[len(during):],
    "errors": [[each.file, each.code] for each in findings if each.severity.value == "error"],
}))
"""


def test_the_whole_corpus_in_one_checkpoint(tmp_path: Path) -> None:
    """Every file has an error of its own, and Python's own audit hook sees no call of theirs."""
    root = make_model(tmp_path / "it")
    files = set()
    for number, (_, _, file, data) in enumerate(cases()):
        (root / f"{number:03d}").mkdir()
        (root / f"{number:03d}" / file).write_bytes(data)
        files.add(f"{number:03d}/{file}")
    done = subprocess.run(
        [sys.executable, "-c", AUDIT_HOOKED, str(root)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    assert seen["during"] == []
    assert seen["after"] == ["pickle.find_class"]  # what a call of theirs would have left
    pickles = {file for file, code in seen["errors"] if code in ("PICKLE_CALLS", "PICKLE_OPAQUE")}
    assert pickles == files
