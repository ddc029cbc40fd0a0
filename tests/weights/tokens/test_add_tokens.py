"""New tokens in a base: tokenizer, tables and config.json agree; other files do not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.core.errors import ArtifactError, ConfigError
from tasks.weights.files.folder import inspect_checkpoint
from tasks.weights.tokens.add_tokens import grow
from tests.tiny import tiny


def model_folder(path: Path, *, tied: bool, shards: str = "5GB") -> Path:
    """Save a Qwen2 of 259 tokens in bf16."""
    from transformers import Qwen2ForCausalLM

    from tests.training.conftest import make_tokenizer

    tokenizer = make_tokenizer()
    config = tiny("Qwen2", vocab_size=len(tokenizer), tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size=shards)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(("tied", "shards"), [(True, "5GB"), (False, "20KB")])
def test_everything_grows_together(tmp_path: Path, tied: bool, shards: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model_folder(tmp_path / "source", tied=tied, shards=shards)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    folder = tmp_path / "base"
    folder.mkdir()
    for path in source.iterdir():  # as `prepare_base` does
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copyfile(path, folder / path.name)
    grown = grow(folder, ["<tool>", "<answer>"], multiple=64)
    assert (grown.ids, grown.before, grown.after) == ((259, 260), 259, 320)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    checkpoint = inspect_checkpoint(folder)
    assert checkpoint.problems == []
    assert all(check.ok for check in checkpoint.checks)
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []

    tokenizer = AutoTokenizer.from_pretrained(folder)
    a, b = (tokenizer(text)["input_ids"] for text in "ab")
    assert tokenizer("a<tool>b<answer>")["input_ids"] == [*a, 259, *b, 260]
    old = AutoModelForCausalLM.from_pretrained(source)
    new, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert new.config.vocab_size == 320
    ids = torch.tensor([[3, 50, 7, 258]])
    with torch.no_grad():
        assert torch.equal(old(ids).logits, new(ids).logits[..., :259])
    for row, expected in (
        (old.get_input_embeddings(), new.get_input_embeddings()),
        (old.get_output_embeddings(), new.get_output_embeddings()),
    ):
        mean = row.weight.double().mean(dim=0).to(torch.bfloat16)
        assert torch.equal(expected.weight[259:], mean.expand(61, -1))
        assert torch.equal(expected.weight[:259], row.weight)


def test_spare_rows_are_used_and_unusable_tokens_and_models_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", tied=True)
    first = grow(folder, ["<a>"], multiple=64)
    weights = load_file(folder / "model.safetensors")
    second = grow(folder, ["<b>"])
    assert (first.after, second.ids, second.after) == (320, (260,), 320)
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights.items())
    with pytest.raises(ConfigError, match=r"<\|im_start\|>"):
        grow(folder, ["<|im_start|>"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 258}))
    with pytest.raises(ArtifactError, match="vocab_size=258"):
        grow(folder, ["<c>"])
