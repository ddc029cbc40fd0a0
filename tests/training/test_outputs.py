"""The files of a training that do not depend on it, for every head and kind of base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.training.job import Peft, TrainJob
from tasks.training.model.build import load_model, load_tokenizer
from tasks.training.model.score_head import config_of_head
from tasks.training.outputs import write_model
from tests.settings import Settings

ONE_RANK = SimpleNamespace(gpu=False, rank=0, world_size=1, sequence_group=None)


@pytest.fixture(scope="module", params=["language", "reward"])
def plain_base(request: pytest.FixtureRequest, tmp_path_factory, base: Path, tokenizer) -> Path:
    """A language model or a reward model, without generation_config.json."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("plain") / request.param
    if request.param == "language":
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("generation_config.json"))
        return folder
    model = AutoModelForSequenceClassification.from_pretrained(base, **config_of_head(None))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("objective", ["sft", "reward"])
def test_files_of_every_head_and_base(
    plain_base: Path, objective: str, kind: str, tmp_path: Path, tokenizer
) -> None:
    if objective == "sft" and plain_base.name == "reward":
        pytest.skip("refused before the first step: it has no language head")
    job = TrainJob(
        settings=Settings(objective=objective, peft=Peft(kind)),
        base=plain_base,
        base_digest="",
        data=tmp_path,
        out=tmp_path,
        checkpoints=tmp_path,
    )
    loaded = load_tokenizer(job)
    head = "score" if objective == "reward" else "tokens"
    zero = {"zero_optimization": {"stage": 0}}
    model = load_model(job, ONE_RANK, zero, tokenizer=loaded, head=head)
    write_model(job, model=model, tokenizer=loaded)
    names = {path.name for path in tmp_path.iterdir()}
    wanted = {"config.json", "generation_config.json", "partitions.json", "tokenizer"}
    assert names == wanted | ({"adapter_config.json"} if kind == "lora" else set())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
