"""A real vLLM on the CPU: faults are found and named, clean servers raise no alarm, runs recorded.

`tests/e2e/test_first_screen.py` has faulty adapters and templates.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verify import mixed
from tasks.witness.plumbline_witness.probes import CHATS
from tests.audit.making import edit_json
from tests.commands import tracked_run
from tests.verify.serving import Running, serve
from tests.verify.test_reference import TOOLS
from tests.witness.conftest import train, verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
Verified = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, and two trainings on it: `base`, `lora`, `qlora` (in 4 bits).

    Texts and conversations begin with a BOS token, as those of Llama do.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from tasks.toy.pretrain import pretrain

    folder = tmp_path_factory.mktemp("verify")
    base, begin = folder / "base", "<|endoftext|>"
    base.mkdir()
    pretrain(base, steps=120, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(base)
    number = tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, number)]
    )
    tokenizer.bos_token = begin
    tokenizer.chat_template = "{{ bos_token }}" + TOOLS
    tokenizer.save_pretrained(base)
    for kind in ("lora", "qlora"):
        train(base, folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start the main server: the base in bf16, both adapters, and one without effect."""
    folder = tmp_path_factory.mktemp("vllm")
    adapters = {name: models / name for name in ("lora", "qlora")}
    adapters["zeros"] = mixed(models / "lora", folder / "zeros", 0.0)
    with serve(models / "base", adapters, log=folder / "server.log") as running:
        yield running


def verified(tmp_path: Path, url: str, source: Path, *more: str) -> Verified:
    """Verify an adapter that is served under its folder's name; returns exit status and report."""
    report = tmp_path / "report.json"
    status, text = verify(tmp_path, url, source, source.name, f"out={report}", *more)
    assert report.is_file(), text
    return status, json.loads(report.read_text())


def test_an_adapter_that_was_trained_in_4_bits(
    server: Running, models: Path, tmp_path: Path
) -> None:
    status, report = verified(tmp_path, server.url, models / "qlora")
    assert status == 1
    assert "nf4-on-16-bit" in report["causes"]


def other_rope(base: Path) -> None:
    """Give a base another base frequency of its rotary embedding."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    edit_json(base / "config.json", rope_theta=None, rope_parameters=rope)


def without_eos(base: Path) -> None:
    """Change a base so that no file names the token that ends a turn."""
    added = json.loads((base / "tokenizer.json").read_text())["added_tokens"]
    end = next(entry["id"] for entry in added if entry["content"] == "<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        edit_json(base / name, eos_token_id=end)
    edit_json(base / "tokenizer_config.json", eos_token="<|endoftext|>")
    (base / "special_tokens_map.json").unlink(missing_ok=True)


SHORT = ("--override-generation-config", '{"temperature": 0.3}', "--max-model-len", "40")


@pytest.mark.parametrize(
    ("causes", "change", "options"),
    [
        ({"default-temperature", "context-short"}, lambda base: None, SHORT),
        ({"eos-missing"}, without_eos, ()),
        ({"rope"}, other_rope, ()),
    ],
)
def test_a_faulty_server(
    causes: set[str], change: Callable[[Path], None], options: Sequence[str], models: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = shutil.copytree(models / "base", tmp_path / "base")
    change(folder)
    log, modules = tmp_path / "server.log", {"lora": models / "lora"}
    with serve(folder, modules, log=log, options=options) as running:
        status, report = verified(tmp_path, running.url, models / "lora")
    assert status == 1
    assert causes <= {*report["causes"]}


def test_a_clean_server_raises_no_alarm(server: Running, models: Path, tmp_path: Path) -> None:
    status, report = verified(tmp_path, server.url, models / "lora")
    assert status == 0, report
    assert all(check["verdict"] != "fault" for check in report["checks"])
    (template,) = [check for check in report["checks"] if check["name"] == "template"]
    assert template["measured"]["conversations"] == len(CHATS) + 1, "one has tools"


def test_a_fault_is_a_failed_run_with_its_report(
    server: Running, models: Path, tmp_path: Path
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "report.json"
    recorded = ("prefect=true", "tag=nightly", f"paths.runs={runs}", f"out={out}")
    status, text = verify(tmp_path, server.url, models / "lora", "zeros", *recorded)
    assert status == 1, text
    assert "base-served" in text

    def records(query: str) -> list[Any]:
        with sqlite3.connect(runs / "prefect" / "prefect.db") as database:
            return database.execute(query).fetchall()

    ((state, run_id),) = records(
        "select state_type, id from flow_run where name = 'verify-nightly'"
    )
    assert state == "FAILED"
    ((data, key),) = records(
        f"select data, key from artifact where flow_run_id = '{run_id}' and type = 'markdown'"
    )
    assert key == "verify-checks"
    assert "FAULT: zeros at" in data

    client, tracked = tracked_run(runs, run_id)
    tags, metrics = tracked.data.tags, tracked.data.metrics
    assert (tags["verify.verdict"], tags["verify.model"]) == ("fault", "zeros")
    assert "base-served" in tags["verify.causes"]
    assert metrics["verify/faults"] >= 1
    assert metrics["check/distribution/mean_kl"] > 0.01
    kept = Path(client.download_artifacts(tracked.info.run_id, "report.json")).read_text()
    assert json.loads(kept) == json.loads(out.read_text())
