"""Malicious folders and pickles: a finding or an error, in bounded memory, and nothing is run."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.audit import folder as folders
from tasks.audit.run import audit
from tests.audit.hostile.corpus import cases
from tests.audit.making import (
    adapter_tensors,
    make_adapter,
    make_model,
    tensors,
    write_json,
)
from tests.conftest import PROJECT

BOMB = "(a|a)*(a|aa)+(.*)*(.*)*$"


def files_with(root: Path, code: str) -> dict[str, str]:
    findings = audit(root).findings
    return {each.file: each.severity.value for each in findings if each.code == code}


def test_links_pipes_and_endless_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, secret = make_model(tmp_path / "it"), tmp_path / "id_ed25519"
    secret.write_text('{"secret": 3}')
    os.mkfifo(root / "tokenizer.json")
    deep = root
    for _ in range(60):
        deep = deep / "d"
        deep.mkdir()
    for name, target in (
        ("again", root), ("loop", "loop"), ("lost.bin", tmp_path / "nowhere"),
        ("generation_config.json", secret), ("environ", "/proc/self/environ"),
    ):  # fmt: skip
        (root / name).symlink_to(target)
    assert files_with(root, "UNSAFE_FILE") == {
        "d/d/d/d/d/d": "warning", "again": "warning", "loop": "warning", "lost.bin": "warning",
        "generation_config.json": "error", "environ": "error", "tokenizer.json": "error",
    }  # fmt: skip
    monkeypatch.setattr(folders, "MAX_ENTRIES", 3)
    assert files_with(make_model(tmp_path / "other"), "UNSAFE_FILE") == {}
    assert files_with(root, "UNSAFE_FILE")[""] == "error"


def test_headers_and_documents_of_bombs(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    shapes: list[Any] = [[1 << 62] * 60, [-1], [2.5], ["a"], [True], [[]]]
    headers: list[tuple[int | None, bytes]] = [
        (1 << 62, b"{}"),
        (None, b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"),
        (None, b"[" * 1_000_000),
    ]
    for shape in shapes:
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
        headers.append((None, json.dumps({"a": entry}).encode()))
    for size, text in headers:
        length = struct.pack("<Q", size or len(text))
        (root / "model.safetensors").write_bytes(length + text)
        assert [*files_with(root, "BAD_HEADER")] == ["model.safetensors"]
    make_model(root, architectures=["A" * 100_000])
    (root / "tokenizer.json").write_bytes(b"[" * 100_000)
    (root / "generation_config.json").write_bytes(b'{"a":[' + b"0," * 5_000_000 + b"0]}")
    assert files_with(root, "JSON_UNREADABLE").keys() == {
        "generation_config.json",
        "tokenizer.json",
    }


MEGABYTES = 700
"""Most memory; without protection the files take tens of GB, and minutes or hours."""
MEASURED = """
import json, sys
from pathlib import Path
from tasks.audit.run import audit
base = Path(sys.argv[2]) if sys.argv[2] else None
codes = sorted({finding.code for finding in audit(Path(sys.argv[1]), base=base).findings})
# ru_maxrss would include the memory of the test process, which forked this one.
print(json.dumps([codes, Path("/proc/self/status").read_text()]))
"""


def examined(root: Path, base: Path | None = None) -> set[str]:
    """Return the codes of an audit in its own process, which has to stay within the limits."""
    command = [sys.executable, "-c", MEASURED, str(root), str(base or "")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    codes, status = json.loads(done.stdout)
    (peak,) = re.findall(r"VmHWM:\s+(\d+)", status)
    assert int(peak) // 1024 < MEGABYTES
    return set(codes)


def test_patterns_without_end(tmp_path: Path) -> None:
    """Plain settings beside a pattern that is not tried are checked."""
    arrays = {key.replace("q_proj", "a" * 60): array for key, array in adapter_tensors().items()}
    bombs = ("target_modules", "exclude_modules", "layers_pattern")
    settings: dict[str, Any] = dict.fromkeys(bombs, BOMB)
    settings |= {"rank_pattern": {BOMB: 2}, "alpha_pattern": {BOMB: 2}}
    settings |= {"layers_to_transform": [0], "lora_alpha": 0, "modules_to_save": ["lm_head"]}
    root = make_adapter(tmp_path / "it", arrays, **settings)
    reported = examined(root, make_model(tmp_path / "base"))
    assert {"ADAPTER_CONFIG", "ADAPTER_SAVED"} <= reported


def numbers(root: Path) -> None:
    arrays = tensors()
    arrays["model.layers.0.mlp.experts.999999.up.weight"] = arrays["lm_head.weight"]
    arrays["model.layers.999999.mlp.gate.weight"] = arrays["lm_head.weight"]
    huge = 1 << 60
    make_model(root, arrays, num_experts=huge, num_hidden_layers=huge, vocab_size=huge)


def template(root: Path) -> None:
    make_model(root)
    text = "{% for a in range(99999) %}" * 40 + "{{ a }}" + "{% endfor %}" * 40
    write_json(root / "tokenizer_config.json", {"chat_template": text, "eos_token": "x"})
    (root / "chat_template.jinja").write_text("{{ " + "[" * 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("make", [numbers, template])
def test_the_audit_stays_within_its_limits(make: Callable[[Path], None], tmp_path: Path) -> None:
    root = tmp_path / "it"
    make(root)
    assert examined(root)


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
        capture_output=True, text=True, check=True, timeout=300
    )  # fmt: skip
    seen = json.loads(done.stdout)
    assert seen["during"] == []
    assert seen["after"] == ["pickle.find_class"]  # what a call of theirs would have left
    pickles = {file for file, code in seen["errors"] if code == "PICKLE_CALLS"}
    assert pickles == files
