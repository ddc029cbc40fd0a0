from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.convert import convert
from tasks.core.errors import ArtifactError, ConfigError
from tasks.drift.fingerprint import PROFILES, Drift, Fingerprint, drift
from tasks.pipeline.artifact import Origin, inventory, publish, staging
from tasks.pipeline.report import StageReport
from tests.weights.making import copy_reference, failed, measure_here, state_of


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def weights_copy(full_weights: Path, tmp_path: Path) -> Path:
    return shutil.copytree(full_weights, tmp_path / "weights")


def _convert(out: Path, weights: Path, trained: Path, **other) -> StageReport:
    settings = {
        "dtype": "bfloat16",
        "max_shard_size": "5GB",
        "score": _never,
        "profile": PROFILES["standard"],
        "log": logging.getLogger("tests.weights"),
    }
    settings["reference"] = weights  # gathered full weights have their own fingerprint
    return convert(out, weights=weights, trained=trained, **{**settings, **other})


def _never(*_: object) -> Fingerprint:
    raise AssertionError("nothing changed, so nothing is to be measured")


def test_nothing_to_change_links_and_carries_the_drift_over(full_weights, full_run, out) -> None:
    report = _convert(out, full_weights, full_run)
    assert failed(report.checks) == []
    made, source = out / "model.safetensors", full_weights / "model.safetensors"
    assert made.read_bytes() == source.read_bytes()
    assert not os.path.samefile(made, source), "the source is in no store"
    assert report.notes == {"linked": ["model.safetensors"], "drift_carried_over": True}
    assert report.drift == Drift(0.0, 0.0, 0.0, 1.0, pytest.approx(1.0))
    assert not list(out.glob("*.bin"))


def test_resharding_keeps_every_byte_and_the_drift(full_weights, full_run, out) -> None:
    report = _convert(out, full_weights, full_run, max_shard_size="60KB")
    assert failed(report.checks) == []
    assert report.notes["drift_carried_over"] is True
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert all(torch.equal(t, state_of(full_weights)[n]) for n, t in state_of(out).items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    total = sum(t.numel() * t.element_size() for t in state_of(out).values())
    assert index["metadata"]["total_size"] == total
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)
    tensor_bytes = [sum(t.nbytes for t in load_file(f).values()) for f in files]
    assert all(size <= 60_000 for size in tensor_bytes)


def test_served_folder_loads_in_transformers_without_a_gap(full_weights, full_run, out) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _convert(out, full_weights, full_run, max_shard_size="60KB")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_stop_ids_are_the_tokenizers_the_templates_and_the_bases(
    weights_copy, full_run, out
) -> None:
    for name, ids in {"generation_config.json": [7, 2], "config.json": 9}.items():
        document = json.loads((weights_copy / name).read_text())
        (weights_copy / name).write_text(json.dumps({**document, "eos_token_id": ids}))
    report = _convert(out, weights_copy, full_run, score=copy_reference)
    assert failed(report.checks) == []
    for name in ("generation_config.json", "config.json"):
        said = json.loads((out / name).read_text())
        # <|endoftext|>, and <|im_end|> from the template; then the base's
        assert said["eos_token_id"] == [0, 2, 7, 9]
        assert said["pad_token_id"] == 3


def test_fp16_is_measured_again_and_says_so_everywhere(full_weights, full_run, out) -> None:
    report = _convert(out, full_weights, full_run, dtype="float16", score=measure_here)
    assert failed(report.checks) == []
    assert report.notes["drift_carried_over"] is False
    assert {t.dtype for t in state_of(out).values()} == {torch.float16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    reference = Fingerprint.load(full_weights / "fingerprint.fp")
    written = Fingerprint.load(out / "fingerprint.fp")
    assert written.dtype == "float32"
    assert written.formats == reference.formats != {}
    assert report.drift == drift(reference, written, "float16")
    assert 0 < report.drift.mean_kl <= 1e-3


def test_a_value_too_large_for_fp16_fails_by_name(weights_copy, full_run, out) -> None:
    path = weights_copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][5] = 1e6
    save_file(tensors, path, metadata={"format": "pt"})
    report = _convert(out, weights_copy, full_run, dtype="float16", score=copy_reference)
    assert failed(report.checks) == ["values of model.norm.weight"]


def test_a_tied_head_that_differs_fails(weights_copy, full_run, out) -> None:
    path = weights_copy / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path, metadata={"format": "pt"})
    report = _convert(out, weights_copy, full_run, score=copy_reference)
    assert failed(report.checks) == ["lm_head.weight"]


def test_an_untied_config_without_a_head_fails(weights_copy, full_run, out) -> None:
    path = weights_copy / "config.json"
    path.write_text(
        path.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    report = _convert(out, weights_copy, full_run, score=copy_reference)
    assert failed(report.checks) == ["lm_head.weight"]


def test_vocabulary_that_disagrees_with_the_embedding_fails(weights_copy, full_run, out) -> None:
    path = weights_copy / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 300', '"vocab_size": 301'))
    report = _convert(out, weights_copy, full_run, score=copy_reference)
    assert failed(report.checks) == ["model.embed_tokens.weight", "config.json vocab_size"]


def test_a_tokenizer_larger_than_the_embedding_fails(full_weights, full_run, out, tmp_path) -> None:
    trained = shutil.copytree(full_run, tmp_path / "run")
    path = trained / "tokenizer" / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"].append({"id": 300, "content": "<new>", "special": False})
    path.write_text(json.dumps(document))
    report = _convert(out, full_weights, trained)
    assert failed(report.checks) == ["tokenizer fits the embedding"]


def test_a_lost_chat_template_fails(full_weights, full_run, out, tmp_path) -> None:
    trained = shutil.copytree(full_run, tmp_path / "run")
    (trained / "tokenizer" / "chat_template.jinja").unlink()
    report = _convert(out, full_weights, trained)
    assert failed(report.checks) == ["chat template"]


def test_quantization_config_never_reaches_the_served_folder(weights_copy, full_run, out) -> None:
    path = weights_copy / "config.json"
    said = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "bitsandbytes"}}
    path.write_text(json.dumps(said))
    _convert(out, weights_copy, full_run, score=copy_reference)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("size", ["5 parsecs", "0GB", "-1MB", ""])
def test_a_size_that_is_none_is_refused(full_weights, full_run, out, size: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        _convert(out, full_weights, full_run, max_shard_size=size)


def test_an_unknown_dtype_names_the_allowed_ones(full_weights, full_run, out) -> None:
    with pytest.raises(ConfigError, match="bfloat16, float16, float32"):
        _convert(out, full_weights, full_run, dtype="int4")


def test_truncated_weights_are_refused_and_nothing_is_written(weights_copy, full_run, out) -> None:
    path = weights_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="truncated"):
        _convert(out, weights_copy, full_run)
    assert list(out.iterdir()) == []


def test_links_survive_publishing_and_the_next_artifacts_hashes(full_weights, full_run, tmp_path):
    final = tmp_path / "served"
    with staging(final) as work:
        report = _convert(work, full_weights, full_run)
        publish(work, final, Origin(report.kind, "convert", "key"))
    assert inventory(final)[0] == inventory(full_weights)[0]
