"""Benchmarks: rounds of contenders, and made models that our readers accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu, rl
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
def test_every_contender_of_online_learning_runs(tmp_path: Path) -> None:
    bench = rl.Bench(tmp_path, 1, "tiny", "tiny", "float32")
    rows = [row for make in rl.ROWS.values() for row in make(bench)]
    told = [rows[place].detail for place in (0, 2, 3, 5)]
    for detail in told:
        for timed in detail.values():
            assert min(timed["runs_s"]) > 0  # type: ignore[index]
    (ours,), (trl,) = (told[2][name]["told"] for name in ("ours", "trl"))  # type: ignore[index]
    assert len(ours["seconds"]) == len(trl["seconds"]) == 1
    assert sum(ours["phases"].values()) == pytest.approx(sum(ours["seconds"]), rel=0.1)
    for report in (ours, trl):  # 64 responses, which end with EOS or are cut
        assert 64 * 35 < report["tokens"][0] < 64 * 75


@pytest.mark.slow
def test_every_row_of_the_gpu_runs_on_a_cpu_at_a_tiny_size(tmp_path: Path) -> None:
    benches = gpu.Benches.of(tmp_path, 1, tiny=True)
    rows = {name: gpu.measured(name, benches) for name in gpu.ROWS}
    broken = [row.ours for lines in rows.values() for row in lines if "not measured" in row.ours]
    assert broken == []
