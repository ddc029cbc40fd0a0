"""Findings about servers: exports, names of quantised layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.audit.checks.exports import read_gguf
from tasks.audit.run import audit
from tasks.core.errors import ArtifactError
from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus.broken_served import export, quantised


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


def test_a_cut_header_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    file = corpus.broken(Broken("", "qwen2", export())) / "model-q8_0.gguf"
    assert read_gguf(file)
    for end in range(0, 400, 7):
        (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:end])
        with pytest.raises(ArtifactError):
            read_gguf(tmp_path / "cut.gguf")


def test_names_of_layers_that_stay_in_16_bits(corpus: Corpus) -> None:
    for ignored, wrong in (
        (["model.language_model.head"], True),
        (["lm_head"], False),  # tied: not on disk
        (["vision_tower.x", "model.layers.0.self_attn.q_proj.linear"], False),
        (["re:.*self_attn.*"], False),
    ):
        folder = corpus.broken(Broken("", "qwen2", quantised(ignored, 32)))
        assert ("QUANT_CONFIG" in codes(folder)) is wrong, ignored
