"""`eval.lm_eval`: tasks of lm-evaluation-harness, from the configuration to the gate."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.lm_eval import _metrics, identity, lm_eval, task_name
from tasks.release.gate import interval, judge, measured, parse
from tests.tiny import save_model, tiny
from tests.weights.making import ROWS

LOG = logging.getLogger(__name__)
RESULTS = {
    "before": {"plus": {"alias": "plus", "acc,none": 0.25, "acc_stderr,none": 0.1}},
    "after": {
        "plus": {"alias": "plus", "acc,none": 0.5, "acc_stderr,none": 0.05, "sample_len": 20},
        "sums": {"exact_match,strict-match": 0.75, "exact_match_stderr,strict-match": "N/A"},
    },
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Return the YAML file of a task with two choices for each of 20 rows."""
    folder = tmp_path / "plus"
    folder.mkdir()
    rows = [{"q": f"{a} + 1 =", "choices": [f" {a + 1}", f" {a}"], "right": 0} for a in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plus.yaml").write_text(
        f"task: plus\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl"
        "}}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: right\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    return folder / "plus.yaml"


def test_metrics_of_the_harness_become_numbers_of_the_gate() -> None:
    metrics = dict(_metrics(RESULTS))
    assert metrics == {
        "lm_eval/plus/acc/before": 0.25,
        "lm_eval/plus/acc/after": 0.5,
        "lm_eval/plus/acc/error": 0.05,
        "lm_eval/sums/exact_match.strict-match/after": 0.75,
    }
    numbers = measured(metrics, {})
    assert numbers == {
        "lm_eval.plus.acc": 0.5,
        "base:lm_eval.plus.acc": 0.25,
        "lm_eval.sums.exact_match.strict-match": 0.75,
    }
    assert interval("lm_eval.plus.acc", 0.5, metrics) == pytest.approx((0.402, 0.598), abs=1e-3)
    assert interval("lm_eval.sums.exact_match.strict-match", 0.75, metrics) is None
    asked = [parse("lm_eval.plus.acc", ">= base + 0.1"), parse("lm_eval.plus.f1", ">= 0")]
    gate = judge(asked, metrics, numbers, None)
    assert [verdict.verdict for verdict in gate.verdicts] == ["ok", "not measured"]


def test_a_changed_row_is_another_key(task: Path) -> None:
    before = identity([str(task), "gsm8k"])
    assert list(before) == [str(task)]
    rows = task.with_name("rows.jsonl")
    rows.write_text(rows.read_text().replace("3 + 1", "4 + 1"))
    assert identity([str(task)]) != before
    assert (task_name(str(task)), task_name("gsm8k")) == ("plus", "gsm8k")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="make setup-lm-eval")
def test_the_harness_scores_both_models(task: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "base", tmp_path / "served"]
    for seed, folder in enumerate(folders):
        config = tiny("Qwen2", vocab_size=ROWS, max_position_embeddings=128)
        save_model(folder, config, seed=seed)
    out = tmp_path / "out"
    out.mkdir()
    report = lm_eval(
        out, served=folders[1], base=folders[0], tasks=[str(task)], files=identity([str(task)]),
        limit=10, log=LOG, log_path=tmp_path / "log",
    )  # fmt: skip
    assert all(check.ok for check in report.checks)
    results = json.loads((out / "results.json").read_text())
    assert report.metrics["lm_eval/plus/acc/after"] == results["after"]["plus"]["acc,none"]
    assert 0 <= report.metrics["lm_eval/plus/acc/before"] <= 1
