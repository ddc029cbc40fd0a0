"""The page of a run: its numbers, its verdict, its pictures and texts of strangers."""

from __future__ import annotations

import json
import logging
import re
from html import unescape
from pathlib import Path

import pytest

from flows.cli.config import compose_config
from flows.orchestration.flow_run import FlowRun, in_this_process
from flows.report.figures import row_lengths
from flows.report.page import REPORT, write_report
from flows.report.results import response_lengths
from tasks.core.errors import ArtifactError
from tasks.tracking.tracker import Tracker
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


def test_the_numbers_and_pictures_are_those_of_the_run(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    html = written(folder)
    assert html == written(folder)
    summary = json.loads((folder / "summary.json").read_text())
    drifts = {s["drift"]["mean_kl"] for s in summary["stages"] if s["drift"]}
    expected = {value for value in EVAL.values() if value is not None} | drifts
    assert expected | {61.25, 3 << 30, 7 << 29} <= values(html)
    for text in ("34.4%", "53.1%", "+18.8 points", "8.9e-5", "≤ 1.0e-3", "2.13.0+cpu",
                 "python flows/rlhf.py +exp=qlora", "train.max_len=1024"):  # fmt: skip
        assert text in html
    assert f"vllm serve '{SERVED}'" in unescape(html)
    assert "http://" not in html.replace("http://www.w3.org/", "")
    assert "src=" not in html
    pictures = ["Loss by step", "KL from the model before by step", "Length of training rows",
                "Reward of sampled responses", "Length of greedy responses"]  # fmt: skip
    assert re.findall(r'aria-label="([^"]+)"', html) == pictures
    (artifact,) = folder.parents[1].glob("artifacts/report/*")
    assert response_lengths(artifact) == ([4.0, 2.0], [4.0, 2.0], 1)
    assert "nan" not in row_lengths("train", [(7, 3)], 7).svg  # rows of one length


def test_a_failed_run_shows_its_error_and_what_to_type_first(tmp_path: Path) -> None:
    html = unescape(written(refused(tmp_path)))
    assert html.index("-> gate=loose") < html.index("<h2>")
    assert 'class="stage failed"' in html
    assert 0.0162 in values(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == ["The chain"]


def test_texts_of_a_checkpoint_are_escaped(tmp_path: Path) -> None:
    html = written(recorded(tmp_path, response=HOSTILE))
    assert "<script" not in html
    assert "<img" not in html
    assert "\x1b" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ArtifactError("tensor a is missing", details=["b <too>"]), "missing\n  b &lt;too&gt;"),
        (KeyboardInterrupt(130), "<strong>Cancelled</strong>"),
    ],
)
def test_failed_and_cancelled_runs_have_their_page(
    error: BaseException, text: str, tmp_path: Path
) -> None:
    def stages(run: FlowRun) -> None:
        raise error

    words = ["source=s", f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}"]
    composed = compose_config(words, config_name="deliver")
    host = in_this_process("0123456789", LOG)
    tracker = Tracker("", "", None, tmp_path)
    run = FlowRun.begin("deliver", composed, host, tracker=tracker, overrides=words)
    with pytest.raises(type(error)):
        run.run("title", stages)
    assert text in (tmp_path / "runs" / "latest" / REPORT).read_text()
