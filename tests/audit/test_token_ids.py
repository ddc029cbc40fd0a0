"""Ids by tokenizer.json against those of the class that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.audit.repair import repair
from tasks.audit.run import audit
from tasks.weights.tokens.prove_ids import misread
from tests.audit.corpus import Corpus
from tests.audit.corpus.clean import CLEAN


def _codes(folder: Path, base: Path | None = None) -> set[str]:
    return {finding.code for finding in audit(folder, base=base).findings}


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"), CLEAN)


@pytest.fixture
def llama(corpus: Corpus, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(corpus.clean("llama"), folder)
    return folder


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_a_class_that_rebuilds_the_steps_is_an_error_and_is_repaired(
    llama: Path, tmp_path: Path, name: str
) -> None:
    _edit(llama / "tokenizer_config.json", tokenizer_class=name)
    assert misread(llama)
    report = audit(llama)
    assert "TOKENIZER_MISREAD" in {finding.code for finding in report.findings}
    assert report.mendable
    repair(llama, tmp_path / "out")
    assert "TOKENIZER_MISREAD" not in _codes(tmp_path / "out")
    assert misread(tmp_path / "out") == ""


def test_the_repair_with_a_misread_base_keeps_the_ids(llama: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    _edit(base / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    settings = llama / "tokenizer_config.json"
    _edit(settings, tokenizer_class="TokenizersBackend", extra_special_tokens=["<|im_end|>"])
    repair(llama, tmp_path / "out", base=base)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|im_end|>"]
    assert "extra_special_tokens" not in written
    assert misread(tmp_path / "out") == ""


@pytest.mark.parametrize("step", ["pre_tokenizer", "merges", "vocabulary", "decoder"])
def test_a_tokenizer_that_is_not_the_base_s(llama: Path, tmp_path: Path, step: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    path = llama / "tokenizer.json"
    document = json.loads(path.read_text())
    model = document["model"]
    if step == "pre_tokenizer":
        document[step] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    elif step == "decoder":
        document[step] = {"type": "Fuse"}
    elif step == "merges":
        theirs = json.loads((base / "tokenizer.json").read_text())
        theirs["model"]["vocab"]["ab"] = 300
        theirs["model"]["merges"] = [["a", "b"]]
        (base / "tokenizer.json").write_text(json.dumps(theirs))
        model["vocab"]["ab"] = 300
    else:
        model["vocab"]["a"], model["vocab"]["b"] = model["vocab"]["b"], model["vocab"]["a"]
    path.write_text(json.dumps(document))
    assert "TOKENIZER_NOT_OF_BASE" in _codes(llama, base)


def test_added_tokens_are_no_fault(llama: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    path = llama / "tokenizer.json"
    document = json.loads(path.read_text())
    number = 1 + max(document["model"]["vocab"].values())
    document["added_tokens"].append({**document["added_tokens"][0], "id": number, "content": "<t>"})
    path.write_text(json.dumps(document))
    assert "TOKENIZER_NOT_OF_BASE" not in _codes(llama, base)
