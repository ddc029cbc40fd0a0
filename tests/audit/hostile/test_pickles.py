"""The scan of files that may run code: nothing hostile passes, nothing harmless is an error."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from tasks.audit import pickles as scan
from tasks.audit.pickles import TENSORS, TORCH, TRAINERS, Scanned, Scanner
from tests.audit.hostile.corpus import array, cases, legacy, program, reduce, zipped

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
