"""Benchmarks: pages and records of a run, made models, and rounds; most without a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import gpu, inputs, resolve, rl
from benchmarks.harness import Commands, Cost, report_in
from benchmarks.report import BEGIN, END, RL, Row, document, write_docs
from benchmarks.shapes import SIZES
from benchmarks.synthetic import make_adapter, make_model
from benchmarks.weights import Bench, Series, ratio_row
from tests.conftest import PROJECT


def _series(*seconds: float) -> Series:
    return Series(tuple(Cost(wall, 50 + wall, 2 * wall) for wall in seconds))


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


def _timed(*seconds: float, **told: object) -> rl.Timed:
    """Return results of a contender of `make bench-rl`, one number per round."""
    lines = [json.dumps({"bench": {"seconds": [wall], **told}}) for wall in seconds]
    return rl.Timed(tuple(Cost(99, 512, 7, f"a line\n{line}\n") for line in lines))


class _Fixed(rl.Bench):
    """A benchmark with fixed times instead of runs."""

    def __init__(self, **timed: rl.Timed) -> None:
        super().__init__(Path("/nowhere"), 3, "tiny", "tiny", "float32")
        object.__setattr__(self, "timed", timed)

    def _made(self, name: str, function: str, **arguments: object) -> str:
        return name

    def interleaved(self, commands: Commands) -> dict[str, rl.Timed]:
        assert {name: command(Path("out"))[0] for name, command in commands.items()}
        return {name: self.timed[name.replace(" ", "_")] for name in commands}  # type: ignore[attr-defined]


def test_rows_of_bench_rl_are_compared_with_their_bars(tmp_path: Path) -> None:
    ours = _timed(2.0, 4.0, 3.0, tokens=60, overhead=[0.04, 0.06])
    bench = _Fixed(
        ours=ours,
        transformers=_timed(7.2, 7.2, 9.0, tokens=60),
        vLLM_as_shipped=_timed(3.3, 3.3, 3.0, tokens=60),
        merged_weights=_timed(30.0, 30.0, 29.0),
        trl=_timed(9.0, 5.0, 5.9),
        one_step_off_policy=_timed(4.0, 4.0, 5.0),
        in_turns=_timed(5.0, 5.0, 5.0),
    )
    rows = [row for make in rl.ROWS.values() for row in make(bench)]
    assert [row.ratio for row in rows] == ["2.40", "1.10", "0.100", "1.97", "0.050", "0.80"]
    assert [row.met for row in rows] == [False, True, True, False, True, True]
    assert rows[0].ours == "20 tokens/s (15..30)"
    assert rows[2].against == "30 s (29..30)"
    assert rows[4].ours == "5.0% (4.0%..6.0%)"
    shutil.copy(PROJECT / "docs" / "benchmarks-rl.md", tmp_path)
    write_docs(tmp_path, rows, document(rows, 3, bench="rl"), RL)
    page = (tmp_path / "benchmarks-rl.md").read_text()
    assert "| 3 s (2..4) | 30 s (29..30) | 0.100 | <= 0.1 | yes |" in page
    assert "Not measured" not in page.partition(RL.begin)[2]
    record = json.loads((tmp_path / "benchmarks-rl.json").read_text())
    assert record["bench"] == "rl"
    assert record["rows"][0]["detail"]["ours"]["runs_s"] == [2.0, 4.0, 3.0]
    assert "merged weights" in (tmp_path / "benchmarks-rl.svg").read_text()


def test_a_contender_without_a_report_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="without a report:\nnothing"):
        report_in(Cost(1, 1, 1, "nothing"))


def test_all_contenders_have_the_same_prompts() -> None:
    assert inputs.draw_response_lengths() == inputs.draw_response_lengths()
    lengths, prompts = inputs.draw_response_lengths(), inputs.draw_prompts(300)
    assert len(lengths) == len(prompts) == 64
    assert 16 <= min(lengths) < max(lengths) <= 128
    assert all(16 <= len(ids) <= 64 and max(ids) < 300 for ids in prompts)


@pytest.mark.slow
def test_every_contender_of_online_learning_runs(tmp_path: Path) -> None:
    bench = rl.Bench(tmp_path, 1, "tiny", "tiny", "float32")
    rows = [row for make in rl.ROWS.values() for row in make(bench)]
    assert [row.bar for row in rows] == [">= 2.5", ">= 1", "<= 0.1", ">= 2", "<= 5 %", "<= 0.8"]
    told = [rows[place].detail for place in (0, 2, 3, 5)]
    for detail in told:
        for timed in detail.values():
            assert min(timed["runs_s"]) > 0  # type: ignore[index]
    (ours,), (trl,) = (told[2][name]["told"] for name in ("ours", "trl"))  # type: ignore[index]
    assert len(ours["seconds"]) == len(trl["seconds"]) == 1
    assert sum(ours["phases"].values()) == pytest.approx(sum(ours["seconds"]), rel=0.1)
    for report in (ours, trl):  # 64 responses, which end with EOS or are cut
        assert 64 * 35 < report["tokens"][0] < 64 * 75


def test_without_a_gpu_the_page_says_that_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "gpu_name", lambda: None)
    gpu.main(["--root", str(tmp_path), "--docs", str(tmp_path)])
    page = (PROJECT / "docs" / "benchmarks-gpu.md").read_text()
    lines = [line for line in page.splitlines() if "not measured" in line]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "not measured" in line] == lines
    assert len(lines) == len(gpu.ROWS)


def test_a_row_that_fails_costs_no_other_row_and_its_reason_is_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(benches: gpu.Benches) -> list[Row]:
        raise RuntimeError("trl.py: status 1\nModuleNotFoundError: No module named 'trl'\n")

    fine = Row("something", "1 s", "2 s", "2", ">= 1", True, {})
    rows = {name: (lambda benches: [fine]) for name in gpu.ROWS} | {"sft": fails}
    monkeypatch.setattr(gpu, "ROWS", rows)
    monkeypatch.setattr(gpu, "gpu_name", lambda: "NVIDIA H100, CUDA 13.0")
    shutil.copy(PROJECT / "docs" / "benchmarks-gpu.md", tmp_path)
    gpu.main(["--root", str(tmp_path / "root"), "--docs", str(tmp_path)])
    page = (tmp_path / "benchmarks-gpu.md").read_text()
    assert "NVIDIA H100, CUDA 13.0" in page
    assert "| not measured: ModuleNotFoundError: No module named 'trl' |" in page
    assert page.count("| something | 1 s | 2 s |") == len(rows) - 1
    assert gpu.NO_GPU not in page


@pytest.mark.slow
def test_every_row_of_the_gpu_runs_on_a_cpu_at_a_tiny_size(tmp_path: Path) -> None:
    benches = gpu.Benches.of(tmp_path, 1, tiny=True)
    rows = {name: gpu.measured(name, benches) for name in gpu.ROWS}
    broken = [row.ours for lines in rows.values() for row in lines if "not measured" in row.ours]
    assert broken == []


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


def test_resolving_a_finished_stage_reuses_it() -> None:
    times = resolve.measure(artifacts=3, tensors=5, runs=4)
    assert len(times) == 4
    assert min(times) > 0
