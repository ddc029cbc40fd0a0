"""A base with trained adapters, a real vLLM server on the CPU, and the command as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verify import mixed
from tests.commands import environment
from tests.conftest import PROJECT
from tests.verify.serving import Running, serve
from tests.witness.conftest import train


@pytest.fixture(scope="session")
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
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.save_pretrained(base)
    for kind in ("lora", "qlora"):
        train(base, folder / kind, kind)
    return folder


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start the main server: the base in bf16, both adapters, and one without effect."""
    folder = tmp_path_factory.mktemp("vllm")
    adapters = {name: models / name for name in ("lora", "qlora")}
    adapters["zeros"] = mixed(models / "lora", folder / "zeros", 0.0)
    with serve(models / "base", adapters, log=folder / "server.log") as running:
        yield running


class Answer:
    """Exit status, report and output of one command."""

    def __init__(self, done: subprocess.CompletedProcess[str], report: Path) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}

    @property
    def causes(self) -> list[str]:
        """Codes of the likely causes, in the order of the checks."""
        return list(self.report["causes"])

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdicts by check."""
        return {check["name"]: check["verdict"] for check in self.report["checks"]}


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., Answer]:
    """Run `python flows/verify.py` as a user does; the report is read from `out=`."""

    def run(*words: str, **env: str) -> Answer:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        own = any(word.startswith("out=") for word in words)
        done = subprocess.run(
            [sys.executable, str(PROJECT / "flows" / "verify.py"), *words]
            + ([] if own else [f"out={report}"]),
            cwd=tmp_path, env=environment(**env), timeout=280,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return Answer(done, report)

    return run
