"""The page of a run: its numbers, its verdict, texts of strangers, and a browser."""

from __future__ import annotations

import json
import logging
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from flows.cli.config import compose_config
from flows.commands.open_pages import _pages
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, in_this_process
from flows.report.collect import collect
from flows.report.page import REPORT, number, page, write_report
from tasks.core.errors import ArtifactError
from tasks.tracking.tracker import Tracker
from tests.infra.servers.browser import browser, find_chromium
from tests.report.recorded import EVAL, NAME, SERVED, recorded, refused

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


def test_sections_come_in_order_and_those_without_data_are_left_out(tmp_path: Path) -> None:
    html = written(recorded(tmp_path))
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads == [
        "The chain", "Evaluation", "Training", "Samples", "Timeline", "Contract", "To do it again",
    ]  # fmt: skip
    assert html.index('id="verdict"') < html.index("<h2>")
    assert html.index("Last letter: e p i k") < html.index("Same?")  # what changed comes first


def test_a_failed_run_shows_its_error_and_what_to_type_first(tmp_path: Path) -> None:
    html = unescape(written(refused(tmp_path)))
    assert html.index("-> gate=loose") < html.index("<h2>")
    assert "<strong>Failed</strong>" in html
    assert 'class="stage failed"' in html
    assert "more than 1.0e-3 ✗" in html
    assert 0.0162 in values(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == ["The chain", "Timeline"]


def test_curves_have_the_steps_of_training_and_no_nan(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    curves = collect(folder).curves["train"]
    assert curves["loss"] == [(step, 1 / step) for step in range(1, 6)]
    assert curves["eval/loss"] == [(0, 1.5)]
    html = written(folder)
    for label in ("optimizer step", "nats per token", "training", "validation"):
        assert f">{label}</text>" in html


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


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    assert written(folder) == written(folder)


def test_without_matplotlib_there_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = written(recorded(tmp_path))
    assert "matplotlib is not installed" in html
    assert "<svg" not in html
    assert {1 / step for step in range(1, 6)} <= values(html)


def test_an_error_while_writing_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = recorded(tmp_path)
    (folder / "summary.json").write_text("{")
    assert write_report(tmp_path, NAME, LOG) is None
    (line,) = caplog.messages
    assert str(folder / REPORT) in line


def test_many_checks_are_cut_but_never_failed_ones(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    contract = next(tmp_path.glob("artifacts/shards/*/contract.json"))
    verdicts = [
        {"name": f"t{i}", "expected": "finite", "found": "nan", "ok": i < 1500} for i in range(1600)
    ]
    contract.write_text(json.dumps(verdicts))
    collected = collect(folder)
    assert [check["ok"] for check in collected.checks] == [False] * 100 + [True] * 500
    assert "100 failed" in page(collected)


def test_open_names_the_report_of_the_last_run(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    written(folder)
    assert dict(_pages(tmp_path))["report"] == (folder / REPORT).as_uri()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0, "0"), (1e-3, "1.0e-3"), (0.03, "0.03"), (12, "12"), (1e-10, "1.0e-10")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def begin(folder: Path, tracker: Tracker | Untracked) -> FlowRun:
    overrides = ["source=s", f"out={folder / 'out'}", f"paths.runs={folder / 'runs'}"]
    composed = compose_config(overrides, config_name="deliver")
    host = in_this_process("0123456789", LOG)
    return FlowRun.begin("deliver", composed, host, tracker=tracker, overrides=overrides)


@pytest.mark.slow
def test_mlflow_gets_the_page_of_a_completed_run(tmp_path: Path) -> None:
    files = tmp_path / "files"
    tracker = Tracker(f"sqlite:///{tmp_path / 'db'}", "e", files, tmp_path / "outbox")
    begin(tmp_path, tracker).run("title", lambda run: None)
    html = (tmp_path / "runs" / "latest" / REPORT).read_text()
    (logged,) = files.rglob(REPORT)
    assert logged.read_text() == html
    assert f"python flows/deliver.py source=s out={tmp_path / 'out'}" in html


def test_the_page_of_a_failed_run_says_what_to_type(tmp_path: Path) -> None:
    def stages(run: FlowRun) -> None:
        raise ArtifactError("tensor a is missing", details=["b <too>"], hint="force=[merge]")

    with pytest.raises(ArtifactError):
        begin(tmp_path, Untracked()).run("title", stages)
    html = (tmp_path / "runs" / "latest" / REPORT).read_text()
    assert "tensor a is missing\n  b &lt;too&gt;\n  -&gt; force=[merge]" in html


def test_a_run_completes_without_its_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stages(run: FlowRun) -> None:
        (tmp_path / "runs" / "reports" / run.run_id / REPORT).mkdir(parents=True)

    summary = begin(tmp_path, Untracked()).run("title", stages)
    assert (summary["status"], summary["exit_status"]) == ("completed", 0)
    assert [line for line in caplog.messages if REPORT in line]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
def test_a_browser_shows_it_without_errors_and_sorts_and_filters(tmp_path: Path) -> None:
    folder = recorded(tmp_path, tensor=HOSTILE, response=HOSTILE)
    written(folder)
    with browser(tmp_path / "browser") as tab:
        # Errors before the load are kept by a listener that runs ahead of the page's own script.
        listen = (
            "window.problems = [];"
            "addEventListener('error', event => problems.push(event.message));"
            "addEventListener('securitypolicyviolation', event => problems.push(event.blockedURI))"
        )
        tab.call("Page.enable")
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=listen)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            tab.call("Emulation.setEmulatedMedia", features=[feature])
            text = tab.open((folder / REPORT).as_uri(), "Completed", "34.4%", "To do it again")
            assert "8.9e-5" in text
            assert tab.evaluate("problems") == []
            assert tab.evaluate("document.title").startswith("completed: rlhf qlora")
            colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert colour == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}[scheme]
        shown = "[...document.querySelectorAll('#contract tbody tr')].filter(r => !r.hidden)"
        first = shown + ".map(row => row.cells[1].textContent)[0]"
        assert tab.evaluate(first) == "train"
        tab.evaluate("document.querySelectorAll('#contract th button')[1].click()")
        assert tab.evaluate(first) == "merge"
        tab.evaluate(
            "const box = document.querySelector('input'); box.value = 'mean kl';"
            "box.dispatchEvent(new Event('input'))"
        )
        assert tab.evaluate(shown + ".length") == 1
