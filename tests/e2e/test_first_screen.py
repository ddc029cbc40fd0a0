"""The README's first screen: trained elsewhere, delivered, served, verified; and wrong servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.verify import mixed
from tests.commands import command, summary_of
from tests.verify.serving import Running, free_port, serve, started
from tests.witness.conftest import make_base, train
from tests.witness.served import deliver, verify

pytestmark = pytest.mark.timeout(1500)
OTHER_TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


@dataclass(frozen=True)
class Work:
    """Folders of a user: the base, the trainer's output with its record, the delivered model."""

    base: Path
    adapter: Path
    root: Path

    @property
    def served(self) -> Path:
        """The delivered model."""
        return self.root / "served"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Train with plain transformers under the witness, and deliver what it wrote."""
    root = tmp_path_factory.mktemp("first screen")
    base = make_base(root / "base")
    adapter = train(base, root / "out", "lora").out / "checkpoint-2"
    status, text = deliver(root, adapter, f"base={base}")
    assert status == 0, text
    return Work(base, adapter, root)


def test_an_adapter_of_another_trainer_is_delivered_into_vllm(work: Work) -> None:
    """Which base it was trained on, only the record tells; the engine answers as the trainer."""
    stages = {stage["name"]: stage for stage in summary_of(work.root / "runs")["stages"]}
    assert list(stages) == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert stages["reference"]["drift"]["mean_kl"] < 1e-5
    assert stages["smoke_eval"]["drift"]["mean_kl"] < 1e-3


@pytest.mark.parametrize("template", ["", OTHER_TEMPLATE], ids=["as delivered", "other template"])
def test_the_delivered_model_is_served_and_verified(
    work: Work, template: str, tmp_path: Path
) -> None:
    port = free_port()
    words = command("serve", str(work.served), "--host", "127.0.0.1", "--port", str(port))
    if template:
        (tmp_path / "other.jinja").write_text(template)
        words += ["--chat-template", str(tmp_path / "other.jinja")]
    with started(words, port, tmp_path / "server.log") as server:
        status, text = verify(tmp_path, server.url, work.served)
    assert status == (1 if template else 0), text
    assert ("cause: " in text and "template]" in text) == bool(template)


@pytest.fixture(scope="module")
def server(work: Work) -> Iterator[Running]:
    """Serve the base with the adapter, with its step before, and with one without effect."""
    adapters = {
        "trained": work.adapter,
        "zeros": mixed(work.adapter, work.root / "zeros", 0.0),
        "before": work.adapter.with_name("checkpoint-1"),
    }
    with serve(work.base, adapters, log=work.root / "server.log") as running:
        yield running


@pytest.mark.parametrize(
    ("name", "cause"), [("trained", ""), ("zeros", "base-served"), ("before", "other-checkpoint")]
)
def test_a_server_of_adapters_is_verified_by_the_record(
    work: Work, server: Running, name: str, cause: str, tmp_path: Path
) -> None:
    status, text = verify(tmp_path, server.url, work.adapter, name)
    assert status == bool(cause), text
    assert cause in text


def test_an_adapter_of_another_step_is_refused(work: Work, tmp_path: Path) -> None:
    """The record of step 2 beside the tensors of step 1."""
    source = Path(shutil.copytree(work.adapter, tmp_path / "checkpoint-2"))
    other = work.adapter.with_name("checkpoint-1") / "adapter_model.safetensors"
    shutil.copyfile(other, source / other.name)
    status, text = deliver(tmp_path, source, f"base={work.base}", "smoke.engine=transformers")
    assert status == 1, text
    assert not (tmp_path / "served").exists()


def test_a_foreign_base_is_refused(work: Work, tmp_path: Path) -> None:
    foreign = make_base(tmp_path / "base", seed=6)
    source = Path(shutil.copytree(work.adapter, tmp_path / "checkpoint-2"))
    status, text = deliver(tmp_path, source, f"base={foreign}")
    assert status == 2, text
    assert not (tmp_path / "served").exists()
