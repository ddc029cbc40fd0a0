"""The page of a run: its numbers, its verdict and texts of strangers."""

from __future__ import annotations

import json
import logging
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, in_this_process
from flows.report.collect import collect
from flows.report.figures import Lengths
from flows.report.page import REPORT, responses_of, write_report
from tasks.core.errors import ArtifactError
from tests.report.recorded import EVAL, SERVED, recorded, refused

LOG = logging.getLogger(__name__)
HOSTILE = "</script></td><script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[2J"


def written(folder: Path) -> str:
    path = write_report(folder.parents[1], folder.name, LOG)
    assert path == folder / REPORT
    return path.read_text()


def values(html: str) -> set[float]:
    """Return all numbers that the page was made from."""
    return {float(value) for value in re.findall(r'data-value="([^"]+)"', html)}


def test_the_numbers_are_those_of_the_summary(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    html = written(folder)
    assert html == written(folder)
    summary = json.loads((folder / "summary.json").read_text())
    drifts = {s["drift"]["mean_kl"] for s in summary["stages"] if s["drift"]}
    expected = {value for value in EVAL.values() if value is not None} | drifts | {61.25}
    assert expected - values(html) == set()
    for text in ("34.4%", "53.1%", "+18.8 points", "8.9e-5", "≤ 1.0e-3", "torch", "2.13.0+cpu"):
        assert text in html
    assert f"vllm serve '{SERVED}'" in unescape(html)
    assert "python flows/rlhf.py +exp=qlora" in html
    assert "http://" not in html.replace("http://www.w3.org/", "")
    assert "src=" not in html


def test_a_failed_run_shows_its_error_and_what_to_type_first(tmp_path: Path) -> None:
    html = unescape(written(refused(tmp_path)))
    assert html.index("-> gate=loose") < html.index("<h2>")
    assert "<strong>Failed</strong>" in html
    assert 'class="stage failed"' in html
    assert "more than 1.0e-3 ✗" in html
    assert 0.0162 in values(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == ["The chain", "Timeline"]


def test_responses_rows_and_memory_are_shown(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    collected = collect(folder)
    shown = responses_of(collected)["smoke_eval"]
    rewards, tokens = shown.histograms
    assert (rewards.before, rewards.after) == ([-1.0, 0.0], [0.5, 1.25])
    assert (tokens.before, tokens.after) == ([4.0, 2.0], [4.0, 2.0])
    assert (shown.count, shown.cut) == (2, 1)
    lengths = Lengths("train", *collected.lengths["train"])
    assert lengths.rows() == [("50%", 112), ("90%", 128), ("99%", 3072), ("100%", 3072)]
    html = written(folder)
    for figure in ("Reward of sampled responses", "Length of training rows"):
        assert html.count(f'aria-label="{figure}"') == 1
    assert "train.max_len=1024" in html
    assert {3 << 30, 7 << 29} <= values(html)
    svg = Lengths("train", [(7, 3)], 7).svg  # rows of one length
    assert svg.startswith("<svg")
    assert "nan" not in svg


def test_a_reused_training_shows_the_curves_of_the_run_that_trained(tmp_path: Path) -> None:
    first = recorded(tmp_path)
    second = first.with_name("20261124-140000-0a1b2c3d")
    second.mkdir()
    summary = json.loads((first / "summary.json").read_text())
    for stage in summary["stages"]:
        stage["reused"] = True
    (second / "summary.json").write_text(json.dumps(summary))
    assert collect(second).curves == collect(first).curves != {}


def test_texts_of_a_checkpoint_are_escaped(tmp_path: Path) -> None:
    html = written(recorded(tmp_path, tensor=HOSTILE, response=HOSTILE))
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert "\x1b" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


def begin(folder: Path, tracker: Any) -> FlowRun:
    overrides = ["source=s", f"out={folder / 'out'}", f"paths.runs={folder / 'runs'}"]
    composed = compose_config(overrides, config_name="deliver")
    host = in_this_process("0123456789", LOG)
    return FlowRun.begin("deliver", composed, host, tracker=tracker, overrides=overrides)


def test_failed_and_cancelled_runs_have_their_page(tmp_path: Path) -> None:
    for error, text in (
        (
            ArtifactError("tensor a is missing", details=["b <too>"], hint="force=[merge]"),
            "tensor a is missing\n  b &lt;too&gt;\n  -&gt; force=[merge]",
        ),
        (KeyboardInterrupt(130), "<strong>Cancelled</strong>"),
    ):

        def stages(run: FlowRun, error: BaseException = error) -> None:
            raise error

        place = tmp_path / type(error).__name__  # a run is named by its second
        with pytest.raises(type(error)):
            begin(place, Untracked()).run("title", stages)
        assert text in (place / "runs" / "latest" / REPORT).read_text()
