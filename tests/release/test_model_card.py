"""Model cards: what the manifest makes of them, and cards that exist already."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from tasks.pipeline.artifact import Artifact, Origin, open_artifact, publish, verify
from tasks.release.model_card import card, hub_id, license_of, write_card

TEXT = card(
    {"base_model": "a/b", "datasets": [], "license": "mit", "tags": ["plumbline"]},
    "b after sft",
    {"Training": ["- method: `sft`"], "Evaluation": []},
)


def served(tmp_path: Path) -> Artifact:
    work = tmp_path / ".work"
    work.mkdir()
    (work / "config.json").write_text("{}")
    return publish(work, tmp_path / "served", Origin("served", "convert", "k"))


def test_the_manifest_covers_the_card(tmp_path: Path) -> None:
    made = served(tmp_path)
    assert write_card(made.path, TEXT)
    assert not write_card(made.path, TEXT)
    assert open_artifact(made.path) == made  # the digest names the model alone
    assert verify(made) == []
    (made.path / "README.md").write_text(TEXT.replace("sft", "dpo"))
    assert verify(made) == ["README.md: contents changed"]
    (made.path / "README.md").unlink()
    assert verify(made) == ["README.md: missing"]


def test_a_card_is_rewritten_without_a_moment_of_damage(tmp_path: Path, monkeypatch) -> None:
    """A run that is killed between two renames leaves an intact artifact."""
    made, rename = served(tmp_path), Path.rename
    assert write_card(made.path, TEXT)

    def renamed(path: Path, target: Path) -> Path:
        assert verify(open_artifact(made.path)) == []
        moved = rename(path, target)
        assert verify(open_artifact(made.path)) == []
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    assert write_card(made.path, TEXT.replace("sft", "dpo"))


def test_the_header_is_the_hubs(tmp_path: Path) -> None:
    data = ModelCard(TEXT).data
    assert (data.base_model, data.license, data.tags) == ("a/b", "mit", ["plumbline"])
    assert "datasets" not in data.to_dict()
    for text, stated in (("---\nlicense: apache-2.0\n---\n\n# Mine\n", "apache-2.0"), ("# x", "")):
        (tmp_path / "README.md").write_text(text)
        assert license_of(str(tmp_path)) == stated
    assert (hub_id("Qwen/Qwen3-8B"), hub_id("/models/x"), hub_id(None)) == ("Qwen/Qwen3-8B", "", "")
