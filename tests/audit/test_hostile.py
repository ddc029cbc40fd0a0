"""Malicious folders and pickles: a finding or an error, in bounded memory, and nothing is run."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.audit import pickles as scan
from tasks.audit import source as folders
from tasks.audit.pickles import TENSORS, TORCH, TRAINERS, Scanned, Scanner
from tasks.audit.run import audit
from tests.audit.hostile.corpus import array, cases, legacy, program, reduce, zipped
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


CASES = {f"{source}: {case}": (file, data) for source, case, file, data in cases()}


def scanned(path: Path, data: bytes | None = None) -> Scanned:
    if data is not None:
        path.write_bytes(data)
    return Scanner().scan(path)


def hostile(result: Scanned) -> set[str]:
    return result.names - TENSORS - TRAINERS


def test_no_hostile_file_passes_and_one_cut_anywhere_is_scanned(tmp_path: Path) -> None:
    passed = []
    for case, (file, data) in CASES.items():
        result = scanned(tmp_path / file, data)
        if not hostile(result) and not result.unreadable:
            passed.append(case)
        for end in random.Random(case).sample(range(len(data)), min(len(data), 3)):
            scanned(tmp_path / file, data[:end])
    assert passed == []
    assert len(CASES) > 200


def state() -> dict[str, Any]:
    import torch

    tensors = {f"layer.{n}": torch.randn(8, 8).to(torch.bfloat16) for n in range(20)}
    return {**tensors, "flags": torch.tensor([True]), "part": torch.arange(50.0)[10:20]}


def test_what_trainers_write_is_no_error(tmp_path: Path) -> None:
    import torch
    from transformers import TrainingArguments, get_linear_schedule_with_warmup

    for kind in (True, False):
        path = tmp_path / f"pytorch_model_{kind}.bin"
        torch.save(state(), path, _use_new_zipfile_serialization=kind)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
    torch.save(schedule.state_dict(), tmp_path / "scheduler.pt")
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch.save({**states, "cpu": torch.get_rng_state()}, tmp_path / "rng_state.pth")
    with (tmp_path / "random_states_0.pkl").open("wb") as file:
        pickle.dump(states, file)
    for path in list(tmp_path.iterdir()):
        result = scanned(path)
        assert not result.unreadable, path.name
        assert result.names <= TENSORS, path.name
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    torch.save(arguments, tmp_path / "x.bin")
    result = scanned(tmp_path / "x.bin")
    assert "transformers.training_args.TrainingArguments" in result.names
    assert result.names <= TENSORS | TRAINERS
    assert not result.unreadable
    arguments.run_name = Touch(tmp_path / "ran")  # a call hidden among the harmless classes
    torch.save(arguments, tmp_path / "x.bin")
    assert "builtins.getattr" in hostile(scanned(tmp_path / "x.bin"))
    assert not (tmp_path / "ran").exists()


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


HARMLESS: list[tuple[str, bytes]] = [
    ("config.json", b'{"a": 1}'), ("README.md", b"# x\n"), ("merges.txt", b"#version\n"),
    ("requirements.txt", b"cupy\nnumpy\nRay\n"), (".gitignore", b"cache\nlogs\n.env\n"),
    ("x.tiktoken", b"IQ== 0\nIg== 1\n"), ("x.bin", b""), ("x.bin", b"x"),
    ("x.gguf", b"GGUF\x03\0\0\0" + bytes(99)), ("x.pt", b"version https://git-lfs"),
    ("x.safetensors", b"\x80\x02\0\0\0\0\0\0" + b"{}".ljust(0x280)),
    ("x.npy", array(bytes(range(80)), "<i8")), ("x.txt", b"x^2 + y^2\n"), ("x.txt", b"BZhello"),
    ("x.csv", b"column 1, column 2, " * 300 + b"\n1\n"),
    ("x.pkl", pickle.dumps([1, "x", 2.5])), ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9)),
    ("x.tsv.xz", lzma.compress(b"a\tb\n" * 30_000)), ("x.txt.bz2", bz2.compress(b"a\n")),
    ("x.pt", zipped({"x/data.pkl": b"\x80\x02}.", "x/data/0": bytes(range(128, 256)) * 9})),
    ("x.pt", legacy(b"\x80\x02}.") + pickle.dumps([]) + b"\x80\x02\0\0\0\0\0\0" * 9),
]  # fmt: skip


def test_harmless_files_are_no_finding(tmp_path: Path) -> None:
    for name, data in HARMLESS:
        result = scanned(tmp_path / name, data)
        assert (result.names, result.unreadable) == (set(), []), (name, data)


def test_the_allowed_names_are_those_of_torch() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    assert set(_get_allowed_globals()) == TORCH


BOMBS = [
    b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62), b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40),
    b"\x80\x05\x96" + struct.pack("<Q", 1 << 35), b"\x80\x04\x8b\xff\xff\xff\x7f",
    b"\x80\x04\x95" + struct.pack("<Q", 1 << 60), b"\x80\x04Nr\xff\xff\xff\xff.",
    b"\x80\x02T\xff\xff\xff\x7f", b"\x80\x04]\x94" + b"h\0h\0\x86\x94" * 9 + b".",
]  # fmt: skip


def test_bombs_allocate_nothing(tmp_path: Path) -> None:
    for data in BOMBS:
        tracemalloc.start()
        scanned(tmp_path / "x.pkl", data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 << 20, data[:20]


def test_compressed_bombs_are_unreadable_or_cut(tmp_path: Path) -> None:
    assert scanned(tmp_path / "many.gz", gzip.compress(b"") * 1_000_000).unreadable
    damaged = bytearray(gzip.compress(program(reduce("os", "system", "x"))))
    damaged[-8] ^= 1  # of its checksum, which is read after the pickle
    assert scanned(tmp_path / "damaged.gz", bytes(damaged)).unreadable
    data = program(reduce("os", "system", "x"))
    for _ in range(9):
        data = gzip.compress(data)
    assert scanned(tmp_path / "often.gz", data).unreadable
    zeros = lzma.compress(bytes(200 << 20), preset=0)
    assert scanned(tmp_path / "zeros.xz", zeros).names == set()


def test_code_beyond_what_is_read_is_unreadable(tmp_path, monkeypatch) -> None:
    data = program(b"".join(b"X\x03\0\0\0abc0" for _ in range(30_000)), reduce("os", "system", "x"))
    assert hostile(scanned(tmp_path / "x.bin", data)) == {"os.system"}
    monkeypatch.setattr(scan, "MAX_BYTES", 1 << 17)
    assert scanned(tmp_path / "x.bin", data).unreadable
