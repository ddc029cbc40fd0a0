"""Findings about servers: exports, names of quantised layers, lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.audit.checks.exports import read_gguf
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError
from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus.broken_served import export, quantised
from tests.audit.making import edit_json


def codes(folder: Path, base: Path | None = None) -> set[str]:
    findings = audit(folder, base=base).findings
    return {finding.code for finding in findings if finding.severity != "info"}


def test_an_export_is_compared_with_the_folder_that_it_was_made_from(
    corpus: Corpus, tmp_path: Path
) -> None:
    assert "EXPORT_DIFFERS" not in codes(corpus.broken(Broken("", "qwen2", export())))
    trained = corpus.broken(Broken("", "qwen2", export(eos_token_id=7)))
    (trained / "model-q8_0.gguf").rename(tmp_path / "model.gguf")
    assert "EXPORT_DIFFERS" not in codes(tmp_path)  # nothing to compare it with
    assert "EXPORT_DIFFERS" in codes(tmp_path, trained)


def test_every_cut_header_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    file = corpus.broken(Broken("", "qwen2", export())) / "model-q8_0.gguf"
    assert read_gguf(file)
    path = tmp_path / "cut.gguf"
    for end in range(0, 400):
        path.write_bytes(file.read_bytes()[:end])
        with pytest.raises(ArtifactError):
            read_gguf(path)


def test_names_of_layers_that_stay_in_16_bits(corpus: Corpus) -> None:
    for ignored, wrong in (
        (["model.language_model.head"], True),
        (["lm_head"], False),  # tied: not on disk
        (["vision_tower.x", "model.layers.0.self_attn.q_proj.linear"], False),
        (["re:.*self_attn.*"], False),
    ):
        folder = corpus.broken(Broken("", "qwen2", quantised(ignored, 32)))
        assert ("QUANT_CONFIG" in codes(folder)) is wrong, ignored


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
        assert ("WITNESS_DIFFERS" in codes(folder)) is below, limit
