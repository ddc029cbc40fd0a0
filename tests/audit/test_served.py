"""Findings about servers: exports, names of quantised layers, lengths, dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.audit.checks.serving import read_gguf
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError
from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus.broken_served import export, quantised
from tests.audit.making import edit_json


def codes(folder: Path, base: Path | None = None) -> set[str]:
    return {finding.code for finding in audit(folder, base=base).findings}


def test_a_faithful_export_has_no_finding(corpus: Corpus) -> None:
    assert "EXPORT_DIFFERS" not in codes(corpus.broken(Broken("", "qwen2", export())))


def test_an_export_alone_is_compared_with_the_folder_that_it_was_made_from(
    corpus: Corpus, tmp_path: Path
) -> None:
    trained = corpus.broken(Broken("", "qwen2", export(eos_token_id=7)))
    (trained / "model-q8_0.gguf").rename(tmp_path / "model.gguf")
    assert "EXPORT_DIFFERS" not in codes(tmp_path)  # nothing to compare it with
    assert "EXPORT_DIFFERS" in codes(tmp_path, trained)


def test_every_cut_header_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    whole = (corpus.broken(Broken("", "qwen2", export())) / "model-q8_0.gguf").read_bytes()
    assert read_gguf(Path(corpus.broken(Broken("", "qwen2", export()))) / "model-q8_0.gguf")
    path = tmp_path / "cut.gguf"
    for end in range(0, 400):
        path.write_bytes(whole[:end])
        with pytest.raises(ArtifactError):
            read_gguf(path)


@pytest.mark.parametrize(
    ("ignored", "wrong"),
    [
        (["model.language_model.head"], True),
        (["lm_head"], False),  # tied: not on disk
        (["vision_tower.x", "model.layers.0.self_attn.q_proj.linear"], False),
        (["re:.*self_attn.*"], False),
    ],
)
def test_names_of_layers_that_stay_in_16_bits(
    ignored: list[str], wrong: bool, corpus: Corpus
) -> None:
    folder = corpus.broken(Broken("", "qwen2", quantised(ignored, 32)))
    assert ("QUANT_SHAPES" in codes(folder)) is wrong


def test_a_context_below_the_rows_of_the_training(corpus: Corpus) -> None:
    folder = corpus.broken(Broken("", "qwen2", lambda *_: None))
    record = folder / "plumbline.witness"
    record.mkdir()
    (record / "scores.json").write_text("{}")
    facts = {"format": 1, "probes": [], "quantization": {}, "longest_row": 900}
    (record / "witness.json").write_text(json.dumps(facts))
    for limit, below in ((512, True), (1024, False), (10**30, False)):
        edit_json(folder / "config.json", max_position_embeddings=4096)
        edit_json(folder / "tokenizer_config.json", model_max_length=limit)
        assert ("LENGTH_BELOW_ROWS" in codes(folder)) is below, limit


def test_the_name_of_the_dtype(corpus: Corpus) -> None:
    folder = corpus.broken(Broken("", "qwen2", lambda *_: None))
    assert "DTYPE_NAME" in codes(folder)  # as transformers 5 saves it
    edit_json(folder / "config.json", torch_dtype="bfloat16")
    assert "DTYPE_NAME" not in codes(folder)
