"""`smoke.engine=server`: a real `vllm serve` on what a run made, verified and evaluated by HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command, environment, run_in_empty, summary_of
from tests.e2e.conftest import Run, living

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
QUICK = (
    "+exp=sft_qlora", "train.max_steps=4", "model.steps=20", "smoke.eval_samples=8",
    "smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1",
)  # fmt: skip
PROVEN = ("distribution", "template", "tokens", "eos", "context", "sampling", "streaming")


@pytest.fixture(scope="module")
def trained(rlhf: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rlhf(tmp_path_factory.mktemp("server") / "runs", *QUICK, "smoke=server")


def deliver(tmp_path: Path, run: Run, *more: str, **env: str) -> tuple[int, str, dict[str, Any]]:
    """Deliver the adapter of a run, verified by a server; returns status, output and summary."""
    (cwd := tmp_path / "elsewhere").mkdir()
    argv = command(
        "deliver", f"source={run.artifact('gather')}", f"base={run.artifact('prepare_base')}",
        f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}",
        "smoke.engine=server", "smoke.probes=8", *more,
    )  # fmt: skip
    done = run_in_empty(cwd, argv, env=environment(**env), timeout=900)
    return done.returncode, done.stdout, summary_of(tmp_path / "runs")


def report_of(summary: dict[str, Any], name: str = "smoke_eval") -> dict[str, Any]:
    """Return the report of a smoke test, with its folder as `folder`."""
    (stage,) = [stage for stage in summary["stages"] if stage["name"] == name]
    folder = Path(stage["artifact"])
    return {**json.loads((folder / "report.json").read_text()), "folder": folder}


def test_a_run_is_verified_and_evaluated_as_by_the_engine(
    trained: Run, rlhf: Callable[..., Run]
) -> None:
    assert trained.code == 0, trained.output
    report = report_of(trained.summary)
    texts = {check["name"]: check["found"] for check in report["checks"]}
    assert report["engine"] == "server"
    assert all(check["ok"] for check in report["checks"])
    proven = {name: texts[f"server: {name}"] for name in PROVEN}
    assert [text for text in proven.values() if text.startswith("not proven")] == []
    assert 0 < report["mean_kl"] < 1e-3
    assert living(trained.runs) == []

    again = rlhf(trained.runs, *QUICK, "smoke.engine=vllm")
    assert again.code == 0, again.output
    engine = report_of(again.summary)
    assert engine["metrics"].keys() == report["metrics"].keys()
    assert engine["mean_kl"] == pytest.approx(report["mean_kl"], rel=0.5)
    both = [
        [json.loads(line) for line in (made["folder"] / "generations.jsonl").open()]
        for made in (report, engine)
    ]
    same = [a["tokens_after"] == b["tokens_after"] for a, b in zip(*both, strict=True)]
    assert sum(same) >= len(same) - 1  # a tie may be broken otherwise


def test_a_server_with_another_template_is_named(trained: Run, tmp_path: Path) -> None:
    """Start the same server with an option that `transformers` knows nothing of."""
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    (folder := tmp_path / "planted").mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if '--served-model-name' in sys.argv:\n"
        f"    sys.argv += ['--chat-template', {str(template)!r}]\n"
    )
    status, text, _ = deliver(tmp_path, trained, PYTHONPATH=str(folder))
    assert status == 1, text
    assert "server: template" in text
    assert not (tmp_path / "out").exists()
    assert living(tmp_path / "runs") == []
