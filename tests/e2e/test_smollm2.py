"""The real model of the demo: SmolLM2-135M from a GGUF file, trained, served, verified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import command
from tests.e2e.conftest import Run
from tests.e2e.test_chain import STAGES, check_chain
from tests.verify.serving import Running, free_port, serve, started
from tests.witness.served import verify

pytestmark = pytest.mark.timeout(3600)


def test_a_file_that_is_no_gguf_starts_nothing(rlhf: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "my model.gguf").write_bytes(b"GGUF" + bytes(100))
    done = rlhf(tmp_path / "runs", "+exp=sft_qlora", f"model.path={tmp_path}/my model.gguf")
    assert done.code == 2, done.output
    assert "my model.gguf" in done.output
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def trained(rlhf: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A few steps of the demo."""
    runs = tmp_path_factory.mktemp("smol lm") / "runs"
    return rlhf(runs, "+exp=smollm2/sft", "train.max_steps=8", timeout=3000)


@pytest.mark.slow
def test_it_learns_and_what_was_trained_is_served(trained: Run) -> None:
    check_chain(trained, STAGES)
    scores = trained.summary["eval"]
    assert scores["loss_after"] < scores["loss_before"]
    assert scores["function_after"] > scores["function_before"]  # valid JSON
    merged = json.loads((trained.artifact("merge") / "manifest.json").read_text())
    assert merged["notes"]["kept"]["kept"] >= 0.995


@pytest.fixture(scope="module")
def server(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve the trained model."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "server.log"
    words = ["serve", trained.summary["served"], "--host", "127.0.0.1", "--port", str(port)]
    with started(command(*words), port, log) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("template", ["", "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_its_server_is_verified_and_one_with_another_template_is_not(
    trained: Run, server: Running, template: str, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(trained.summary["served"], tmp_path / "source"))
    if template:
        (source / "manifest.json").unlink()
        (source / "chat_template.jinja").write_text(template)
    status, text = verify(tmp_path, server.url, source)
    assert status == bool(template), text
    assert ("template]" in text) == bool(template)


@pytest.mark.slow
def test_a_server_of_the_base_is_not(trained: Run, tmp_path: Path) -> None:
    with serve(trained.artifact("prepare_base"), {}, log=tmp_path / "server.log") as server:
        status, text = verify(tmp_path, server.url, Path(trained.summary["served"]))
    assert status == 1, text
    assert "distribution    FAULT" in text
