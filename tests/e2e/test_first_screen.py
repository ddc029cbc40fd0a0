"""The README's first screen: trained elsewhere, delivered, served, verified; and wrong servers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.verify import mixed
from tasks.drift.fingerprint import drift
from tests.commands import command, summary_of
from tests.verify.serving import Running, free_port, started
from tests.witness.conftest import Trained, deliver, load, make_base, of_files, train, verify

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
    status, text = deliver(root, adapter, f"base={base}", "smoke.engine=transformers")
    assert status == 0, text
    return Work(base, adapter, root)


def test_a_trainers_command_leaves_a_record_in_every_checkpoint(work: Work) -> None:
    lora = Trained(work.adapter.parent)
    for step in (1, 2):
        folder = f"checkpoint-{step}"
        assert lora.facts(folder)["step"] == step
        record = lora.out / folder / "plumbline.witness"
        adapter = lora.out / folder / "adapter_config.json"  # which whoever serves it may read
        assert {path.stat().st_mode for path in record.iterdir()} == {adapter.stat().st_mode}
        moved = of_files(load(work.base, lora.out / folder), lora.fingerprint(folder=folder))
        assert moved.mean_kl < 1e-6
        assert moved.top1_agreement == 1.0
    last = lora.fingerprint(folder="checkpoint-2")
    assert np.array_equal(lora.fingerprint().logprobs, last.logprobs)
    assert drift(lora.fingerprint(folder="checkpoint-1"), last).mean_kl > 1e-4
    assert drift(lora.fingerprint(), lora.fingerprint("base")).mean_kl > 1e-4
    assert of_files(load(work.base, work.base), lora.fingerprint("base")).mean_kl < 1e-6
    facts = lora.facts()  # what no file of an adapter tells
    assert facts["quantization"] == {"method": "none"}
    assert facts["peft"]["adapters"]["default"]["lora_alpha"] == 8
    assert facts["base"]["name"] == str(work.base)
    assert len(facts["base"]["headers_sha256"]) == 64
    assert facts["tokens"]["tokenizer"]["eos_token_id"] == 2
    rows = [probe for probe in facts["probes"] if probe["kind"] == "row"]
    assert [probe["text"] for probe in rows] == [None] * 4


def test_an_adapter_of_another_trainer_is_delivered(work: Work) -> None:
    """The record alone tells the base; an engine answers as the trainer. vLLM serves it below."""
    stages = {stage["name"]: stage for stage in summary_of(work.root / "runs")["stages"]}
    assert list(stages) == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert stages["reference"]["drift"]["mean_kl"] < 1e-5
    assert stages["smoke_eval"]["drift"]["mean_kl"] < 1e-3


@pytest.fixture(scope="module")
def server(work: Work) -> Iterator[Running]:
    """Serve what was delivered, by our command, with adapters: trained on it; undoing the merge."""
    again = train(work.served, work.root / "again", "lora").out / "checkpoint-2"
    undone = mixed(work.adapter, work.root / "undone", -1.0)
    port = free_port()
    words = command(
        "serve", str(work.served), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        "--dtype", "float32", "--served-model-name", "served", "--enable-lora",
        "--max-lora-rank", "8", "--max-loras", "4", "--lora-modules",
        f"again={again}", f"undone={undone}",
    )  # fmt: skip
    with started(words, port, work.root / "server.log") as running:
        yield running


@pytest.mark.parametrize("folder", ["served", "again/checkpoint-2"])
def test_what_was_trained_is_served_and_verified(
    work: Work, server: Running, folder: str, tmp_path: Path
) -> None:
    """The delivered model; an adapter, by a server of its base."""
    status, text = verify(tmp_path, server.url, work.root / folder, Path(folder).parts[0])
    assert status == 0, text


@pytest.mark.parametrize(
    ("name", "expected", "causes"),
    [
        ("undone", "checkpoint-2", {"base-served", "lora-leak"}),
        ("served", "checkpoint-1", {"other-checkpoint"}),
        ("served", "other template", {"template"}),
    ],
)
def test_every_fault_of_a_server_has_its_cause(
    work: Work, server: Running, name: str, expected: str, causes: set[str], tmp_path: Path
) -> None:
    """A server without the adapter, of another step, with another template than is expected."""
    source = work.adapter.with_name(expected)
    if expected == "other template":
        shutil.copytree(work.served, source := tmp_path / "other")
        (source / "chat_template.jinja").chmod(0o644)
        (source / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    status, text = verify(tmp_path, server.url, source, name)
    assert status == 1, text
    assert set(re.findall(r"\[([a-z-]+)\]", text)) == causes


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
