"""Real servers: `vllm serve` with adapters, and `transformers serve`.

The same questions through one interface, and answers that are the trained model's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tasks.drift.fingerprint import Fingerprint
from tasks.verify.answers import Answers
from tasks.verify.checks.ending import context, eos
from tasks.verify.checks.leak import leak
from tasks.verify.checks.load import batching, long_prompts, prefix_cache, streaming
from tasks.verify.checks.prompt import template, tokens
from tasks.verify.reference import Reference, read_reference
from tasks.verify.servers.connect import connect
from tasks.verify.servers.server import Scores, ServerError
from tests.verify.serving import Running, free_port, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def reference(models: Path) -> Reference:
    return read_reference(models / "lora-0")


def apart(print_: Fingerprint, scores: Sequence[Scores]) -> float:
    """Return the mean absolute difference at the ids that both sides have, in nats."""
    entries = [entry for part in scores for entry in zip(part.ids, part.logprobs, strict=True)]
    differences = []
    for at, (ids, values) in enumerate(entries):
        known = dict(zip(print_.ids[at].tolist(), print_.logprobs[at].tolist(), strict=True))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        differences += [abs(known[token] - value) for token, value in pairs if token in known]
    assert len(entries) == print_.positions
    return float(np.mean(differences))


def test_vllm_answers_as_its_models_were_measured(server: Running, reference: Reference) -> None:
    asked = connect(server.url)
    assert (asked.kind, asked.abilities.prompt_logprobs) == ("vllm", 20)
    assert asked.abilities.tokenize
    assert asked.abilities.render
    served = {entry.name: entry for entry in asked.models()}
    assert served["lora-0"].parent == "base"
    assert reference.base is not None
    trained = asked.score("lora-0", reference.sequences)
    base = asked.score("base", reference.sequences)
    near, far = apart(reference.trained, trained), apart(reference.trained, base)
    print(f"adapter {near:.4f}, base instead {far:.4f} nats")
    assert near < 0.05 < far
    assert apart(reference.base, base) < 0.05
    assert all(len(ids) >= 20 for part in trained for ids in part.ids)


def test_vllm_passes_every_check_of_prompts_and_load(server: Running, reference: Reference) -> None:
    answers = Answers(connect(server.url), reference)
    functions = (template, tokens, eos, context, streaming, leak, batching, prefix_cache)
    checks = [check(answers, "lora-0", "base") for check in (*functions, long_prompts)]
    assert {check.name: check.verdict for check in checks} == {c.name: "ok" for c in checks}
    print(*(f"{check.name}: {check.text}" for check in checks), sep="\n")


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
