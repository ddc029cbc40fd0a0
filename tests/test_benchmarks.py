"""What `make bench-weights` writes at the end of its run, without the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.children import Cost, Series
from benchmarks.report import BEGIN, END, document, write_docs
from benchmarks.rounds import Bench, ratio_row
from benchmarks.shapes import SIZES
from benchmarks.synthetic import make_adapter, make_model
from tests.conftest import PROJECT


def _series(*seconds: float) -> Series:
    return Series(tuple(Cost(one, 50 + one, 2 * one) for one in seconds))


def test_only_the_table_of_the_documents_is_replaced(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "docs" / "benchmarks.md", tmp_path)
    before = (tmp_path / "benchmarks.md").read_text()
    ours, peer = _series(1.0, 3.0, 2.0), _series(9.0, 8.0, 7.0)
    detail: dict[str, object] = {"ours": ours.as_json(), "peer": peer.as_json()}
    rows = [ratio_row("merge, 1.5 B, vs peft", ours, peer, 0.25, detail)]
    write_docs(tmp_path, rows, document(rows, 3))
    after = (tmp_path / "benchmarks.md").read_text()
    assert "| 2.00 s (1.00..3.00), 52 MB | 8.00 s (7.00..9.00), 58 MB | 0.25 | <= 0.25 |" in after
    assert after.partition(BEGIN)[0] == before.partition(BEGIN)[0]
    assert after.partition(END)[2] == before.partition(END)[2]
    assert json.loads((tmp_path / "benchmarks.json").read_text())["rows"][0]["met"] is True
    assert "merge, 1.5 B" in (tmp_path / "benchmarks.svg").read_text()


def test_without_a_place_for_the_table_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text("no marks")
    with pytest.raises(ValueError, match="around the table"):
        write_docs(tmp_path, [], {"rows": []} | document([], 3))
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks.md"]


def test_every_contender_runs_in_every_round_and_the_first_is_not_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def command(name: str, out: Path) -> list[str]:
        return ["sh", "-c", 'test ! -e "$1" && mkdir "$1" && echo "$2" >> "$3"', "sh", str(out),
                name, str(log)]  # fmt: skip

    bench = Bench(tmp_path, 3, ["tiny"])
    found = bench.interleaved({n: lambda out, n=n: command(n, out) for n in ("one", "two")})
    assert log.read_text().split() == ["one", "two"] * 4
    assert {name: len(series.costs) for name, series in found.items()} == {"one": 3, "two": 3}


def test_a_synthetic_base_is_one_that_our_readers_take(tmp_path: Path, monkeypatch) -> None:
    from benchmarks import jobs, synthetic

    monkeypatch.setattr(synthetic, "SHARD", 60_000)
    make_model(tmp_path / "base", SIZES["tiny"])
    make_adapter(tmp_path / "adapter", SIZES["tiny"])
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    jobs.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    jobs.convert(tmp_path / "merged", tmp_path / "served")
    assert (tmp_path / "served" / "manifest.json").is_file()
