"""TRL: checkpoints of its trainers are delivered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit.corpus import Corpus
from tests.audit.corpus.clean import CLEAN
from tests.delivery.conftest import Done
from tests.delivery.test_deliver import merged_by_peft, same
from tests.weights.making import state_of

Run = Callable[..., Done]
pytestmark = pytest.mark.slow  # TRL takes many seconds to import


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("trl"), CLEAN)


def test_an_adapter_of_sft(here: Run, corpus: Corpus, tmp_path: Path) -> None:
    adapter, base = corpus.clean("trl-lora"), corpus.clean("qwen2")
    done = here(
        f"source={adapter}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}"
    )
    assert done.code == 0, done.output
    assert done.stages == ["audit", "merge", "convert"]
    assert same(state_of(tmp_path / "out"), merged_by_peft(base, adapter))


@pytest.mark.parametrize("name", ["trl-sft", "trl-reward"])
def test_a_full_model(here: Run, corpus: Corpus, name: str, tmp_path: Path) -> None:
    source = corpus.clean(name)
    done = here(f"source={source}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert"]
    actual, wanted = state_of(tmp_path / "out"), state_of(source)
    assert same(actual, {key: tensor.to(actual[key].dtype) for key, tensor in wanted.items()})
