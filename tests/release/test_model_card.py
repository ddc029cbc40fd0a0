"""Model cards: what the manifest makes of them, and cards that exist already."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from tasks.pipeline.artifact import Artifact, Origin, open_artifact, publish, verify
from tasks.release.model_card import beside, card, hub_id, license_of, write_card

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


def test_a_card_that_exists_is_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "README.md"
    assert beside(TEXT, theirs) == TEXT
    theirs.write_text("---\nlicense: apache-2.0\n---\n\n# Mine\n")
    assert license_of(str(tmp_path)) == "apache-2.0"
    both = beside(TEXT, theirs)
    assert ModelCard(both).data.license == "apache-2.0"
    assert "# Mine\n\n# Delivered by Plumbline\n\n## Training" in both
    theirs.write_text(both)
    assert beside(TEXT, theirs) == both  # delivered again
    assert (hub_id("Qwen/Qwen3-8B"), hub_id("/models/x"), hub_id(None)) == ("Qwen/Qwen3-8B", "", "")


def test_the_card_of_an_adapter_becomes_that_of_a_model(tmp_path: Path) -> None:
    """TRL writes the folder of the base into it, and the tags of an adapter."""
    theirs = tmp_path / "README.md"
    theirs.write_text(
        "---\nbase_model: /home/me/base\nlibrary_name: peft\nlicense: mit\npipeline_tag: "
        "text-generation\ntags:\n- base_model:adapter:/home/me/base\n- lora\n- sft\n---\n\n# Mine\n"
    )
    data = ModelCard(both := beside(TEXT, theirs)).data
    assert (data.library_name, data.base_model, data.tags) == ("transformers", None, ["sft"])
    assert (data.license, data.pipeline_tag) == ("mit", "text-generation")
    assert "/home/me" not in both
    theirs.write_text("---\nbase_model: a/b\nlibrary_name: peft\n---\n# Mine\n")
    assert ModelCard(beside(TEXT, theirs)).data.base_model == "a/b"
