"""Weights become the folder to serve: linked, resharded or cast, with every file that loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ContractError
from tasks.drift.fingerprint import Fingerprint
from tests.audit.making import edit_json
from tests.weights.making import converted, copy_reference, failed, state_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def weights_copy(full_weights: Path, tmp_path: Path) -> Path:
    return shutil.copytree(full_weights, tmp_path / "weights")


def _never(*_: object) -> Fingerprint:
    raise AssertionError("nothing changed, so nothing is to be measured")


def test_resharding_keeps_every_byte_and_loads_in_transformers(full_weights, full_run, out) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = converted(out, full_weights, full_run, _never, max_shard_size="60KB")
    assert failed(report.checks) == []
    assert report.notes["drift_carried_over"] is True
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert all(torch.equal(t, state_of(full_weights)[n]) for n, t in state_of(out).items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state_of(out).values())
    assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 60_000 for file in files)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not {*info["missing_keys"], *info["unexpected_keys"]}
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_stop_ids_are_the_tokenizers_the_templates_and_the_bases(
    weights_copy, full_run, out
) -> None:
    for name, ids in {"generation_config.json": [7, 2], "config.json": 9}.items():
        edit_json(weights_copy / name, eos_token_id=ids)
    report = converted(out, weights_copy, full_run, copy_reference)
    assert failed(report.checks) == []
    for name in ("generation_config.json", "config.json"):
        document = json.loads((out / name).read_text())
        # <|endoftext|>, and <|im_end|> from the template; then the base's
        assert document["eos_token_id"] == [0, 2, 7, 9]
        assert document["pad_token_id"] == 3


def test_what_cannot_be_served_fails_by_name(weights_copy, full_run, out, tmp_path) -> None:
    trained = shutil.copytree(full_run, tmp_path / "run")
    path, config = weights_copy / "model.safetensors", weights_copy / "config.json"
    tensors, whole = load_file(path), path.read_bytes()
    tensors["model.norm.weight"][5] = 1e6  # too large for fp16
    tensors[HEAD] = tensors[EMBEDDING] + 1  # which should be tied
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = trained / "tokenizer" / "tokenizer.json"
    tokens = json.loads(tokenizer.read_text())["added_tokens"]
    edit_json(tokenizer, added_tokens=[*tokens, {"id": 300, "content": "<new>", "special": False}])
    report = converted(out, weights_copy, trained, copy_reference, dtype="float16")
    assert set(failed(report.checks)) == {
        "values of model.norm.weight",
        HEAD,
        "tokenizer fits the embedding",
    }

    path.write_bytes(whole)
    edit_json(config, tie_word_embeddings=False)  # without a head
    with pytest.raises(ContractError, match=HEAD):
        converted(tmp_path / "second", weights_copy, full_run, copy_reference)
    edit_json(config, tie_word_embeddings=True, vocab_size=301)
    with pytest.raises(ContractError, match=EMBEDDING):
        converted(tmp_path / "third", weights_copy, full_run, copy_reference)
