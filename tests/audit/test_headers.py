"""Damaged and empty files, and tensors against the model's class."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tasks.audit.finding import Finding
from tasks.audit.run import audit
from tests.audit.making import (
    adapter_tensors,
    codes,
    edit_json,
    errors,
    make_adapter,
    make_model,
    tensors,
)  # fmt: skip

WEIGHTS = "model.safetensors"


def only(root: Path, code: str) -> Finding:
    (match,) = [finding for finding in audit(root).findings if finding.code == code]
    return match


class TestFiles:
    @pytest.mark.parametrize("keep", [0, 7, 100, -8])
    def test_a_truncated_file(self, keep: int, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        raw = (root / WEIGHTS).read_bytes()
        (root / WEIGHTS).write_bytes(raw[:keep])
        assert errors(codes(root)) == {"BAD_HEADER"}

    def test_a_pointer_of_git_lfs(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
        assert errors(codes(root)) == {"NOT_WEIGHTS_YET"}

    def test_the_adapter_of_40_bytes(self, tmp_path: Path) -> None:
        """safetensors writes 40 bytes for no tensors: peft #2500, trl #4416."""
        root = make_adapter(tmp_path / "it", {})
        save_file({}, root / "adapter_model.safetensors", metadata={"format": "pt"})
        assert (root / "adapter_model.safetensors").stat().st_size == 40
        assert codes(root)["NO_TENSORS"] == "error"

    def test_placeholders_of_zero3(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it", {k: v[:0, 0] for k, v in adapter_tensors().items()})
        finding = only(root, "EMPTY_TENSOR")
        assert finding.found == "8 of 8 tensors empty, shape [0]"

    def test_placeholders_in_a_pickle(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it")
        (root / "adapter_model.safetensors").unlink()
        torch.save({k: torch.empty(0) for k in adapter_tensors()}, root / "adapter_model.bin")
        assert only(root, "EMPTY_TENSOR").file == "adapter_model.bin"

    def test_entries_that_are_not_tensors_or_not_contiguous(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it")
        (root / "adapter_model.safetensors").unlink()
        state: dict[str, Any] = {k: torch.from_numpy(v) for k, v in adapter_tensors().items()}
        first = next(iter(state))
        state[first] = state[first].T.contiguous().T
        torch.save({**state, "step": 3}, root / "adapter_model.bin")
        reported = codes(root)
        assert (reported["NO_TENSOR_ENTRY"], reported["NOT_CONTIGUOUS"]) == ("warning", "warning")


class TestContract:
    def test_missing_and_unknown(self, tmp_path: Path) -> None:
        arrays = tensors()
        arrays["model.layers.1.mlp.up_projection.weight"] = arrays.pop(
            "model.layers.1.mlp.up_proj.weight"
        )
        root = make_model(tmp_path / "it", arrays)
        assert only(root, "TENSOR_MISSING").found == "1 of 21 missing"
        assert only(root, "TENSOR_UNEXPECTED").severity == "error"

    def test_a_shape_of_another_configuration(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", intermediate_size=48)
        mismatches = [
            finding for finding in audit(root).findings if finding.code == "SHAPE_MISMATCH"
        ]
        assert [(finding.found, finding.expected) for finding in mismatches] == [
            ("[24, 16]", "[48, 16]"), ("[16, 24]", "[16, 48]"),
        ]  # fmt: skip
        assert mismatches[0].tensor.endswith("and 1 more")

    def test_a_tied_head_may_be_absent(self, tmp_path: Path) -> None:
        arrays = tensors()
        del arrays["lm_head.weight"]
        root = make_model(tmp_path / "it", arrays, tie_word_embeddings=True)
        assert errors(codes(root)) == set()

    def test_buffers_that_transformers_4_saved(self, tmp_path: Path) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        root = make_model(tmp_path / "it", {**tensors(), name: np.ones(2, np.float32)})
        plain = make_model(tmp_path / "plain")
        assert codes(root) == codes(plain)
        assert errors(codes(root)) == set()

    def test_a_reward_model_has_no_lm_head(self, tmp_path: Path) -> None:
        arrays = tensors()
        arrays["score.weight"] = arrays.pop("lm_head.weight")[:1]
        names = ["LlamaForSequenceClassification"]
        root = make_model(tmp_path / "it", arrays, architectures=names, num_labels=1)
        assert errors(codes(root)) == set()


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

    def test_control_codes_are_not_printed(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", {**tensors(), "\x1b[2J\x07": np.ones(2, np.float32)})
        assert "\x1b" not in audit(root).text()
        assert "\\x1b[2J" in audit(root).text()

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
