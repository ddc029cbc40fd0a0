"""A real `transformers serve`; `test_served.py` and `test_faults.py` run a real vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasks.verify.answers import Answers
from tasks.verify.checks.prompt import template
from tasks.verify.reference import Reference, read_reference
from tasks.verify.servers.connect import connect
from tasks.verify.servers.server import ServerError
from tests.verify.serving import free_port, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def reference(models: Path) -> Reference:
    return read_reference(models / "lora-0")


def test_transformers_serve_renders_as_in_training(
    models: Path, reference: Reference, tmp_path: Path
) -> None:
    """Without log-probabilities, prompts can be compared by their length, and never proven."""
    port, folder = free_port(), str(models / "base")
    program = Path(sys.executable).with_name("transformers")
    words = [str(program), "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--device", "cpu"]
    with started(words, port, tmp_path / "server.log") as server:
        asked = connect(server.url, model=folder, tokenizer=models / "lora-0")
        assert asked.kind == "transformers"
        (made,) = asked.generate(folder, CHAT, 2, temperature=0)
        chat = next(probe for probe in reference.probes if probe.messages)
        assert made.prompt_length == len(chat.ids)
        check = template(Answers(asked, reference), folder, None)
        assert (check.verdict, "as many tokens" in check.text) == ("unknown", True)
        with pytest.raises(ServerError, match="no log-probabilities"):
            asked.score(folder, [[1, 2, 3]])
