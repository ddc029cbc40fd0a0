"""A real vLLM on the CPU: faults are found and named, clean servers raise no alarm, runs recorded.

`tests/e2e/test_first_screen.py` has faulty adapters and templates.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import tracked_run
from tests.verify import faults
from tests.verify.conftest import Answer
from tests.verify.serving import Running, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
Verify = Callable[..., Answer]


def is_found(answer: Answer, cause: str) -> None:
    """Check that a fault was found, and that the planted cause is among the likely ones."""
    assert answer.code == 1, answer.out + answer.err
    assert cause in answer.causes, answer.out


def test_an_adapter_that_was_trained_in_4_bits(
    server: Running, models: Path, verify: Verify
) -> None:
    answer = verify(f"url={server.url}", f"source={models / 'qlora'}", "name=qlora")
    is_found(answer, "nf4-on-16-bit")


SHORT = ("--override-generation-config", '{"temperature": 0.3}', "--max-model-len", "40")


@pytest.mark.parametrize(
    ("causes", "base", "options"),
    [
        (["default-temperature", "context-short"], None, SHORT),
        (["eos-missing"], faults.without_eos, ()),
        (["rope"], faults.other_rope, ()),
    ],
)
def test_a_faulty_server(
    causes: Sequence[str], base: Callable[[Path, Path], Path] | None, options: Sequence[str],
    models: Path, verify: Verify, tmp_path: Path,
) -> None:  # fmt: skip
    folder = base(models, tmp_path / "base") if base else models / "base"
    log, modules = tmp_path / "server.log", {"lora": models / "lora"}
    with serve(folder, modules, log=log, options=options) as running:
        answer = verify(f"url={running.url}", f"source={models / 'lora'}", "name=lora")
    for cause in causes:
        is_found(answer, cause)


def test_a_clean_server_raises_no_alarm(server: Running, models: Path, verify: Verify) -> None:
    answer = verify(f"url={server.url}", f"source={models / 'lora'}", "name=lora")
    assert answer.code == 0, answer.out + answer.err
    assert "fault" not in answer.verdicts.values()


def records(runs: Path, query: str) -> list[Any]:
    with sqlite3.connect(runs / "prefect" / "prefect.db") as database:
        return database.execute(query).fetchall()


def test_a_fault_is_a_failed_run_with_its_report(
    server: Running, models: Path, verify: Verify, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    words = (f"url={server.url}", f"source={models / 'lora'}", "prefect=true", "tag=nightly")
    answer = verify(*words, "name=zeros", f"paths.runs={runs}")
    assert answer.code == 1, answer.out + answer.err
    assert "base-served" in answer.out
    query = "select state_type, id from flow_run where name = 'verify-nightly'"
    ((state, run_id),) = records(runs, query)
    assert state == "FAILED"
    table = f"select data, key from artifact where flow_run_id = '{run_id}' and type = 'markdown'"
    ((text, key),) = records(runs, table)
    assert key == "verify-checks"
    assert "| distribution | FAULT |" in text

    client, tracked = tracked_run(runs, run_id)
    tags, metrics = tracked.data.tags, tracked.data.metrics
    assert (tags["verify.verdict"], tags["verify.model"]) == ("fault", "zeros")
    assert "base-served" in tags["verify.causes"]
    assert metrics["verify/faults"] >= 1
    assert metrics["check/distribution/mean_kl"] > 0.01
    kept = Path(client.download_artifacts(tracked.info.run_id, "report.json")).read_text()
    assert json.loads(kept) == answer.report
