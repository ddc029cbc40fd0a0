"""The scan of files that may run code: nothing hostile passes, nothing harmless is an error."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
import pickle
import random
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._weights_only_unpickler import _get_allowed_globals
from transformers import TrainingArguments, get_linear_schedule_with_warmup

from tasks.weights.pickled import scan
from tasks.weights.pickled.allowed import TENSORS, TORCH, TRAINERS
from tasks.weights.pickled.scan import Scanned, Scanner
from tests.delivery.peers import run_peer
from tests.weights.pickled.corpus import cases
from tests.weights.pickled.making import array, evil, legacy, program, reduce, zipped

CASES = {f"{source}: {case}": (file, data) for source, case, file, data in cases()}


def scanned(path: Path, data: bytes | None = None) -> Scanned:
    if data is not None:
        path.write_bytes(data)
    return Scanner().scan(path)


def hostile(result: Scanned) -> set[str]:
    return result.names - TENSORS - TRAINERS


@pytest.mark.parametrize("case", CASES)
def test_no_hostile_file_passes(case: str, tmp_path: Path) -> None:
    file, data = CASES[case]
    result = scanned(tmp_path / file, data)
    assert hostile(result) or result.unreadable


@pytest.mark.parametrize("case", CASES)
def test_a_file_cut_anywhere_is_scanned(case: str, tmp_path: Path) -> None:
    file, data = CASES[case]
    for end in random.Random(case).sample(range(len(data)), min(len(data), 8)):
        scanned(tmp_path / file, data[:end])


def state() -> dict[str, Any]:
    tensors = {f"layer.{n}": torch.randn(8, 8).to(torch.bfloat16) for n in range(20)}
    return {**tensors, "flags": torch.tensor([True]), "part": torch.arange(50.0)[10:20]}


def trainer_files(root: Path) -> None:
    """Write what a trainer writes beside the weights."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
    torch.save(schedule.state_dict(), root / "scheduler.pt")
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch.save({**states, "cpu": torch.get_rng_state()}, root / "rng_state.pth")
    with (root / "random_states_0.pkl").open("wb") as file:
        pickle.dump(states, file)


def test_what_trainers_write_is_no_error(tmp_path: Path) -> None:
    for kind in (True, False):
        path = tmp_path / f"pytorch_model_{kind}.bin"
        torch.save(state(), path, _use_new_zipfile_serialization=kind)
    trainer_files(tmp_path)
    for path in tmp_path.iterdir():
        result = scanned(path)
        assert not result.unreadable, path.name
        assert result.names <= TENSORS, path.name


def test_training_arguments_are_classes(tmp_path: Path) -> None:
    torch.save(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), tmp_path / "x.bin")
    result = scanned(tmp_path / "x.bin")
    assert "transformers.training_args.TrainingArguments" in result.names
    assert result.names <= TENSORS | TRAINERS
    assert not result.unreadable


def test_a_call_hidden_in_training_arguments(tmp_path: Path) -> None:
    arguments = copy.copy(TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    arguments.run_name = Touch(tmp_path / "ran")
    torch.save(arguments, tmp_path / "x.bin")
    assert "builtins.getattr" in hostile(scanned(tmp_path / "x.bin"))
    assert not (tmp_path / "ran").exists()


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    dcp.save({"model": state(), "step": 3}, checkpoint_id=tmp_path / "it", no_dist=True)
    paths = [*(tmp_path / "it").iterdir()]
    assert {path.name for path in paths} >= {".metadata", "__0_0.distcp"}
    for path in paths:
        result = scanned(path)
        assert (hostile(result), result.unreadable) == (set(), []), path.name
    assert any("checkpoint.metadata" in name for name in scanned(tmp_path / "it/.metadata").names)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b'{"a": 1}'), ("README.md", b"# x\n"), ("merges.txt", b"#version\n"),
        ("requirements.txt", b"cupy\nnumpy\nRay\n"), (".gitignore", b"cache\nlogs\n.env\n"),
        ("x.tiktoken", b"IQ== 0\nIg== 1\n"), ("x.bin", b""),
        ("x.gguf", b"GGUF\x03\0\0\0" + bytes(99)), ("x.pt", b"version https://git-lfs"),
        ("x.safetensors", b"\x80\x02\0\0\0\0\0\0" + b"{}".ljust(0x280)),
        ("x.npy", array(bytes(range(80)), "<i8")), ("x.txt", b"x^2 + y^2\n"), ("x.txt", b"BZhello"),
        ("x.csv", b"column 1, column 2, " * 300 + b"\n1\n"),
        ("x.zip", zipped({"a.txt": b"cold\nand\nwet."}, zipfile.ZIP_DEFLATED)),
        ("x.json.gz", gzip.compress(b'{"a": 1}' * 99, mtime=0)),
        ("x.pkl", pickle.dumps([1, "x", 2.5])),
        ("x.pt", legacy(b"\x80\x02}.") + pickle.dumps([]) + b"\x80\x02\0\0\0\0\0\0" * 9),
    ],
)  # fmt: skip
def test_harmless_files(name: str, data: bytes, tmp_path: Path) -> None:
    result = scanned(tmp_path / name, data)
    assert (result.names, result.unreadable) == (set(), [])


@given(data=st.binary(max_size=300), name=st.sampled_from(["x.bin", "x", "x.safetensors"]))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_bytes_in_a_storage_are_no_finding(data: bytes, name: str, tmp_path: Path) -> None:
    result = scanned(tmp_path / name, zipped({"x/data.pkl": b"\x80\x02}.", "x/data/0": data}))
    assert (result.names, result.unreadable) == (set(), [])


def test_the_allowed_names_are_those_of_torch() -> None:
    assert set(_get_allowed_globals()) == TORCH


def test_no_allowed_name_is_a_module_or_a_method() -> None:
    for name in TENSORS | TRAINERS:
        module, _, leaf = name.rpartition(".")
        assert module, name
        assert leaf not in ("getattr", "eval", "exec", "open", "load", "loads", "__import__")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62), b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40),
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 35), b"\x80\x04\x8b\xff\xff\xff\x7f",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60), b"\x80\x04Nr\xff\xff\xff\xff.",
        b"\x80\x02T\xff\xff\xff\x7f", b"\x80\x04]\x94" + b"h\0h\0\x86\x94" * 9 + b".",
    ],
)  # fmt: skip
def test_bombs_allocate_nothing(data: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    scanned(tmp_path / "x.pkl", data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_a_packed_bomb_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_BYTES", 1 << 20)
    for data in (gzip.compress(bytes(8 << 20)), lzma.compress(bytes(8 << 20))):
        tracemalloc.start()
        result = scanned(tmp_path / "x.gz", data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "unpacks to 1048576 bytes or more" in result.unreadable[0]
        assert peak < 8 << 20


def test_endless_files_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_STEPS", 50_000)
    started = time.process_time()
    scanner = Scanner()
    (tmp_path / "long").write_bytes(b"\x80\x04" + b"N0" * 400_000 + evil())
    (tmp_path / "late").write_bytes(program(b"N0" * 60, reduce("os", "system", "id")))
    assert scanner.scan(tmp_path / "long").unreadable == ["more than 50000 instructions"]
    assert scanner.scan(tmp_path / "late").unreadable == ["more than 64 instructions"]
    assert time.process_time() - started < 5


def test_a_pickle_longer_than_the_limit_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_BYTES", 1 << 17)
    data = program(b"".join(b"X\x03\0\0\0abc0" for _ in range(30_000)), reduce("os", "system", "x"))
    assert "cut short" in scanned(tmp_path / "x.bin", data).unreadable[0]
    monkeypatch.undo()
    assert hostile(scanned(tmp_path / "x.bin", data)) == {"os.system"}


def test_data_beyond_what_is_read_is_unreadable_only_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_BYTES", 1 << 17)
    for claimed, unreadable in ((1 << 18, True), (1 << 30, False)):
        data = b"B" + struct.pack("<I", claimed) + bytes(1 << 18) + b"0cos\nsystem\n(S'id'\ntR."
        assert bool(scanned(tmp_path / "x.bin", data).unreadable) is unreadable


def test_a_link_is_scanned(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(evil())
    (tmp_path / "x.bin").symlink_to("blob")
    assert hostile(scanned(tmp_path / "x.bin")) == {"os.system"}


def documented() -> list[list[str]]:
    """Return the cells of the table's rows: case, picklescan, fickling, modelscan, ours."""
    page = Path(__file__).parents[3] / "docs/pickle-scan.md"
    tables = page.read_text().partition("## picklescan")[2]
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines()]
    return [row for row in rows if len(row) == 5 and row[4] != "ours"]


def test_the_documented_table_is_what_the_scan_says(tmp_path: Path) -> None:
    verdicts = []
    for _, case, file, data in cases():
        result = scanned(tmp_path / file, data)
        verdicts.append([case, "caught" if hostile(result) else "unreadable"])
    assert [[row[0], row[4]] for row in documented()] == verdicts


@pytest.mark.peers
def test_the_documented_table_is_what_the_others_say(tmp_path: Path) -> None:
    for number, (_, _, file, data) in enumerate(cases()):
        path = tmp_path / "cases" / f"{number:03d}" / file
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    program, out = Path(__file__).with_name("scanners.py"), tmp_path / "verdicts.json"
    run_peer("scanners", str(program), str(tmp_path / "cases"), str(out), cwd=tmp_path / "run")
    verdicts = sorted(json.loads(out.read_text()).items())
    assert [row[1:4] for row in documented()] == [others for _, others in verdicts]
