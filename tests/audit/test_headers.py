"""Damaged and empty files, and tensors against the model's class."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tasks.audit.finding import Finding
from tasks.audit.run import audit
from tests.audit.making import (
    codes,
    edit_json,
    make_model,
)  # fmt: skip

WEIGHTS = "model.safetensors"


def only(root: Path, code: str) -> Finding:
    (match,) = [finding for finding in audit(root).findings if finding.code == code]
    return match


class TestBombs:
    """Malicious files: every read is limited in advance."""

    def header(self, root: Path, text: bytes, size: int | None = None) -> Path:
        make_model(root)
        length = struct.pack("<Q", len(text) if size is None else size)
        (root / WEIGHTS).write_bytes(length + text)
        return root

    def test_a_header_longer_than_the_file(self, tmp_path: Path) -> None:
        root = self.header(tmp_path / "it", b"{}", 1 << 62)
        assert "BAD_HEADER" in codes(root)

    def test_many_small_values(self, tmp_path: Path) -> None:
        text = b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"
        finding = only(self.header(tmp_path / "it", text), "BAD_HEADER")
        assert "at most 4000000 are read" in finding.found

    def test_depth(self, tmp_path: Path) -> None:
        root = self.header(tmp_path / "it", b"[" * 1_000_000)
        assert "too deep" in only(root, "BAD_HEADER").found

    @pytest.mark.parametrize("shape", [[1 << 62] * 60, [-1], [2.5], ["a"], [True], [[]]])
    def test_invalid_shapes(self, shape: Any, tmp_path: Path) -> None:
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
        root = self.header(tmp_path / "it", json.dumps({"a": entry}).encode())
        assert "BAD_HEADER" in codes(root)

    def test_json_files(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / "tokenizer.json").write_bytes(b"[" * 100_000)
        (root / "generation_config.json").write_bytes(b'{"a":[' + b"0," * 5_000_000 + b"0]}")
        edit_json(root / "config.json", architectures=["A" * 100_000])
        unreadable = [
            finding for finding in audit(root).findings if finding.code == "JSON_UNREADABLE"
        ]
        assert sorted(finding.file for finding in unreadable) == [
            "generation_config.json",
            "tokenizer.json",
        ]
