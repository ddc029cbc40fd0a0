"""A broken base is reported as the base: hub caches, values, 8-bit numbers, norms, references."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tasks.audit.run import Report, audit
from tasks.core.errors import ConfigError, DriftError
from tasks.delivery.examination import require_base
from tasks.drift.fingerprint import Fingerprint, require_informative
from tests.audit.making import (
    Arrays,
    adapter_tensors,
    make_adapter,
    make_model,
    make_shards,
    tensors,
)


def errors(report: Report) -> set[str]:
    return {finding.code for finding in report.errors}


def hub_cache(tmp_path: Path) -> Path:
    """Return the snapshot of a sharded model in a hub cache."""
    plain = make_shards(tmp_path / "plain")
    repository = tmp_path / "hub" / "models--x--y"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in plain.iterdir():
        if file.suffix == ".safetensors":
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
        else:
            digest = subprocess.check_output(["git", "hash-object", file], text=True).strip()
        blob = repository / "blobs" / digest
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "config.json"])
def test_blobs_are_hashed_with_values_and_only_then(tmp_path: Path, name: str) -> None:
    snapshot = hub_cache(tmp_path)
    assert not errors(audit(snapshot, values=True))
    blob = (snapshot / name).resolve()
    data = bytearray(blob.read_bytes())
    if name == "config.json":
        data[1:1] = b" "
    else:
        data[-6] ^= 1
    blob.write_bytes(data)
    assert not errors(audit(snapshot))
    adapter = make_adapter(tmp_path / "it")
    report = audit(adapter, base=snapshot, values=True)
    assert report.of_base is not None
    assert (errors(report), errors(report.of_base), report.ok) == (set(), {"BLOB_DIFFERS"}, False)
    assert f"source={snapshot} values=true" in report.text()
    with pytest.raises(ConfigError, match="BLOB_DIFFERS"):
        require_base(snapshot, whole=True)


@pytest.mark.parametrize("index", [True, False])
def test_an_interrupted_download_is_no_fault_of_the_adapter(tmp_path: Path, *, index: bool) -> None:
    snapshot = hub_cache(tmp_path)
    shard = snapshot / "model-00002-of-00003.safetensors"
    blob = shard.resolve()
    left = blob.with_name(f"{'b' * 64}.incomplete")
    left.touch()
    assert not errors(audit(snapshot)), "left behind by another revision"
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    left.unlink()
    shard.unlink()
    if not index:
        (snapshot / "model.safetensors.index.json").unlink()
    report = audit(make_adapter(tmp_path / "it", adapter_tensors()), base=snapshot)
    assert report.of_base is not None
    assert not errors(report)
    (interrupted,) = (e for e in report.of_base.errors if e.code == "DOWNLOAD_INTERRUPTED")
    assert interrupted.fix.startswith("hf download x/y --revision aaaa")


def zeros(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {k: a * (name not in k) for k, a in arrays.items()}


def bare(arrays: Arrays) -> Arrays:
    return {k: a.astype(np.int8) if k.endswith("proj.weight") else a for k, a in arrays.items()}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (zeros("lm_head"), "ALL_ZERO"),
        (zeros("v_proj"), "ALL_ZERO"),
        (zeros("layers.1.mlp.down_proj"), "ALL_ZERO"),
        (lambda arrays: {k: np.ones_like(a) for k, a in arrays.items()}, "CONSTANT_ROWS"),
        (lambda arrays: {k: a * np.nan for k, a in arrays.items()}, "NOT_FINITE"),
        (bare, "QUANT_NO_SCALES"),
    ],
)
def test_values_of_a_base(change: Callable[[Arrays], Arrays], code: str, tmp_path: Path) -> None:
    require_base(make_model(tmp_path / "fine"), whole=True)
    added = zeros("layers.1.self_attn.o_proj")(zeros("layers.1.mlp.down_proj")(tensors()))
    require_base(make_model(tmp_path / "llama pro", added), whole=True)
    broken = make_model(tmp_path / "broken", change(tensors()))
    with pytest.raises(ConfigError, match=code):
        require_base(broken, whole=True)


def test_norms_and_directions(tmp_path: Path) -> None:
    base, rng = make_model(tmp_path / "base"), np.random.default_rng(1)

    def codes(name: str, arrays: Arrays) -> set[str]:
        return errors(audit(make_model(tmp_path / name, arrays), base=base, values=True))

    noisy = {
        k: a + 0.1 * rng.standard_normal(a.shape, np.float32) if a.ndim > 1 else 9 * a
        for k, a in tensors().items()
    }
    assert not codes("trained", noisy)
    raw = {k: a * (300 if "q_proj" in k else 1) for k, a in tensors().items()}
    assert codes("raw", raw) == {"NORM_DIFFERS"}
    assert codes("other", tensors(seed=1)) == {"WRONG_BASE"}


def test_a_reference_depends_on_its_context() -> None:
    rng = np.random.default_rng(0)
    probes = tuple(tuple(rng.integers(0, 4, 12).tolist()) for _ in range(4))
    count, size = 44, 30

    def print_of(rows: np.ndarray) -> Fingerprint:
        exact = (rows - np.log(np.exp(rows).sum(1, keepdims=True))).astype(np.float32)
        ids = np.tile(np.arange(size, dtype=np.int32), (count, 1))
        return Fingerprint(probes, ids, exact, exact.argmax(1).astype(np.int32), "transformers")

    by_token = rng.standard_normal((4, size))
    last = [token for probe in probes for token in probe[:-1]]
    require_informative(print_of(0.01 * rng.standard_normal((count, size))), "random")
    for broken in (np.zeros((count, size)), np.tile(by_token[0], (count, 1)), by_token[last]):
        with pytest.raises(DriftError, match="no reference"):
            require_informative(print_of(broken), "broken")
