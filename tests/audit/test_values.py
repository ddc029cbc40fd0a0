"""`values=true`: checks of tensor data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.audit.run import audit
from tasks.audit.scan import scan
from tasks.audit.source import open_source
from tasks.pipeline.artifact import Origin, publish
from tests.audit.making import (
    adapter_tensors,
    codes,
    errors,
    make_adapter,
    make_model,
    make_shards,
    tensors,
)  # fmt: skip

EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def test_data_is_read_only_with_values(tmp_path: Path) -> None:
    arrays = tensors()
    arrays[UP][3, 3] = np.nan
    root = make_model(tmp_path / "it", arrays)
    assert errors(codes(root)) == set()
    assert errors(codes(root, values=True)) == {"NOT_FINITE"}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(dtype: type, value: float, tmp_path: Path) -> None:
    arrays = {key: array.astype(dtype) for key, array in tensors().items()}
    arrays[UP][[1, 3], 3] = value
    (finding,) = [
        candidate for candidate in audit(make_model(tmp_path / "it", arrays), values=True).findings
        if candidate.code == "NOT_FINITE"
    ]  # fmt: skip
    assert (finding.found, finding.tensor) == ("2 elements of 1 tensors", UP)


def test_an_adapter_without_effect(tmp_path: Path) -> None:
    arrays = adapter_tensors()
    halves = [key for key in arrays if "lora_B" in key]
    for key in halves[1:]:
        arrays[key][:] = 0
    assert codes(make_adapter(tmp_path / "some", arrays), values=True)["LORA_B_ZERO"] == "warning"
    arrays[halves[0]][:] = 0
    assert codes(make_adapter(tmp_path / "all", arrays))["LORA_B_ZERO"] == "error"
    assert "values=true" not in audit(tmp_path / "all").text()
    assert errors(codes(make_adapter(tmp_path / "good"), values=True)) == set()


def test_an_empty_tensor_is_not_a_zero_tensor(tmp_path: Path) -> None:
    arrays = {
        key: np.ones((0,), np.float32) if "lora_B" in key else array
        for key, array in adapter_tensors().items()
    }
    reported = codes(make_adapter(tmp_path / "it", arrays), values=True)
    assert reported["EMPTY_TENSOR"] == "error"
    assert "LORA_B_ZERO" not in reported


def test_rows(tmp_path: Path) -> None:
    arrays = tensors()
    arrays[EMBED][[7, 9]] = 0
    arrays[UP][5] = 0.25
    arrays["model.layers.0.mlp.down_proj.weight"][:] = 0
    reported = {
        finding.code: finding
        for finding in audit(make_model(tmp_path / "it", arrays), values=True).findings
    }
    assert reported["DEAD_EMBEDDING"].found == "2 of 40 rows are zero: 7, 9"
    assert reported["CONSTANT_ROWS"].found == "1 of 24 rows: 5"
    padded = make_model(tmp_path / "padded", arrays, pad_token_id=9)
    assert "DEAD_EMBEDDING" in codes(padded, values=True)
    arrays[EMBED][7] = 1
    assert "DEAD_EMBEDDING" not in codes(make_model(padded, arrays, pad_token_id=9), values=True)
    assert reported["ALL_ZERO"].tensor == "model.layers.0.mlp.down_proj.weight"


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    arrays = tensors()
    root = make_model(tmp_path / "two", arrays, tie_word_embeddings=True)
    assert codes(root, values=True)["TIED_HEAD_DIFFERS"] == "error"
    arrays[HEAD] = arrays[EMBED].copy()
    root = make_model(tmp_path / "one", arrays, tie_word_embeddings=True)
    assert "TIED_HEAD_DIFFERS" not in codes(root, values=True)


def test_values_beyond_fp16(tmp_path: Path) -> None:
    arrays = tensors()
    arrays[UP][0, 0] = 70_000.0
    (finding,) = [
        candidate for candidate in audit(make_model(tmp_path / "it", arrays), values=True).findings
        if candidate.code == "DTYPE_RANGE"
    ]  # fmt: skip
    assert finding.found == "up to 7e+04"


def test_data_against_the_manifest(tmp_path: Path) -> None:
    work = make_shards(tmp_path / "work", 3)
    publish(work, tmp_path / "it", Origin("weights", "merge", "key"))
    assert errors(codes(tmp_path / "it", values=True)) == set()
    file = tmp_path / "it" / "model-00002-of-00003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert errors(codes(tmp_path / "it", values=True)) == {"SHA256_DIFFERS"}
    (tmp_path / "it" / "added.txt").write_text("later")
    assert codes(tmp_path / "it")["MANIFEST_DIFFERS"] == "error"


def test_the_block_size_does_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = tensors()
    arrays[UP][5] = 0.25
    arrays[EMBED][[0, 39]] = 0
    arrays[HEAD][11, 3] = np.inf
    root = tmp_path / "it"
    make_model(root, arrays)
    save_file(arrays, root / "model.safetensors")
    source = open_source(root, values=True)
    hashes = dict.fromkeys(source.tensors, "blake3")
    whole = scan(source, source.tensors, hashes=hashes)
    monkeypatch.setattr("tasks.audit.scan._BLOCK", 192)
    assert scan(source, source.tensors, hashes=hashes) == whole
