"""Benchmarks: rounds of contenders, and made models that our readers accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.shapes import SIZES
from benchmarks.synthetic import make_adapter, make_model
from benchmarks.weights import Bench


def test_every_contender_runs_in_every_round_and_the_first_is_not_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def command(name: str, out: Path) -> list[str]:
        return ["sh", "-c", 'test ! -e "$1" && mkdir "$1" && echo "$2" >> "$3"', "sh", str(out),
                name, str(log)]  # fmt: skip

    bench = Bench(tmp_path, 3, ["tiny"])
    timed = bench.interleaved({n: lambda out, n=n: command(n, out) for n in ("one", "two")})
    assert log.read_text().split() == ["one", "two"] * 4
    assert {name: len(series.costs) for name, series in timed.items()} == {"one": 3, "two": 3}


def test_our_readers_accept_a_synthetic_base(tmp_path: Path, monkeypatch) -> None:
    from benchmarks import synthetic
    from benchmarks.contenders import weights

    monkeypatch.setattr(synthetic, "SHARD", 60_000)
    make_model(tmp_path / "base", SIZES["tiny"])
    make_adapter(tmp_path / "adapter", SIZES["tiny"])
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    weights.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    weights.convert(tmp_path / "merged", tmp_path / "served")
    assert (tmp_path / "served" / "manifest.json").is_file()


@pytest.mark.slow
def test_every_row_of_the_gpu_runs_on_a_cpu_at_a_tiny_size(tmp_path: Path) -> None:
    benches = gpu.Benches.of(tmp_path, 1, tiny=True)
    rows = {name: gpu.measured(name, benches) for name in gpu.ROWS}
    broken = [row.ours for lines in rows.values() for row in lines if "not measured" in row.ours]
    assert broken == []
