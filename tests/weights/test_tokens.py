"""Tokenizers, chat templates and vocabularies: read like transformers, grown, or refused."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError, ConfigError
from tasks.weights.files.folder import model_files
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora import changes, read_adapter
from tasks.weights.merge import plan_merge
from tasks.weights.model import model_facts
from tasks.weights.tokens.add_tokens import grow
from tasks.weights.tokens.render_template import MAX_CHARACTERS
from tasks.weights.tokens.tokenizer import (
    TokenizerFacts,
    read_tokenizer,
    require_bounded_template,
    vocabulary_findings,
)
from tests.tiny import FAMILIES, TEMPLATE, make_tokenizer, random_model, save_base, save_tokenizer
from tests.weights.making import quiet, save, train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def _settings(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_agrees_with_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), read_tokenizer(folder)
    assert (ours.rows, ours.eos, ours.pad) == (
        len(theirs), theirs.eos_token_id, theirs.pad_token_id,
    )  # fmt: skip
    assert ours.template == theirs.chat_template == TEMPLATE
    assert ours.end_of_turn == theirs.convert_tokens_to_ids("<|im_end|>")
    assert ours.stops == [0, 2]


IGNORING_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
)


def test_stops_of_other_templates(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    for text, stops in (
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", [0]),
        (IGNORING_SYSTEM, [0, 2]),
    ):
        template.write_text(text)
        assert read_tokenizer(folder).stops == stops
    template.unlink()
    assert read_tokenizer(folder).stops == [0]
    _settings(folder, chat_template=[{"name": "default", "template": TEMPLATE}])
    assert read_tokenizer(folder).stops == [0, 2]
    _settings(folder, eos_token={"content": "<|im_end|>", "special": True}, pad_token=None)
    facts = read_tokenizer(folder)
    assert (facts.stops, facts.pad) == ([2], None)


def test_a_broken_template_or_eos_is_refused(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    good = path.read_text()
    for text in ("{% for %}", "{{ messages.__class__.__mro__ }}", "hello", "{{ 1 / 0 }}"):
        path.write_text(text)
        with pytest.raises(ArtifactError, match="template"):
            read_tokenizer(folder)
    path.write_text("{{ raise_exception('roles must alternate') }}")
    require_bounded_template(folder)  # of a base it is left to its users
    path.write_text(good)
    for eos in (None, "</s>"):
        _settings(folder, eos_token=eos)
        with pytest.raises(ArtifactError, match=eos or "eos_token"):
            read_tokenizer(folder)


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(t='a') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}"
        "{% endfor %}{{ ns.t }}",
        "x" * (MAX_CHARACTERS + 1),
    ],
    ids=["loops", "doubling", "length"],
)
def test_a_template_without_bounds_is_refused(folder: Path, bomb: str) -> None:
    place = "tokenizer_config.json" if bomb.startswith("x") else "chat_template.jinja"
    (folder / "chat_template.jinja").unlink()
    if place == "chat_template.jinja":
        (folder / place).write_text(bomb)
    else:
        _settings(folder, chat_template=bomb)
    with pytest.raises(ArtifactError, match=place):
        read_tokenizer(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # kilobytes


GROWN = 104  # from 96


def _wrong(base: Path, adapter: Path) -> list[str]:
    """Plan a merge and return its findings, for a tokenizer of 100 ids."""
    lora = read_adapter(adapter)
    facts, weights = model_facts(base, "float32"), read_checkpoint(base)
    plan = plan_merge(weights, facts, changes(lora, facts))
    planned = {op.name: op.shape for op in plan.ops}
    tokenizer = TokenizerFacts(100, eos=99, pad=98, end_of_turn=None, template="")
    return list(vocabulary_findings(planned, facts, tokenizer))


def test_an_adapter_without_all_grown_embeddings_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = random_model(FAMILIES["llama"].config(tie_word_embeddings=False)).float()
    with quiet():
        model.save_pretrained(base)
        model.resize_token_embeddings(GROWN, mean_resizing=False)
    trained = train(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    save(trained, adapter, save_embedding_layers=True)
    assert _wrong(base, adapter) == []
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    for left_out, things in (
        (("lm_head",), ("104", "96")),
        (("lm_head", "embed_tokens"), ("100", "96", "save_embedding_layers=True")),
    ):
        kept = {
            name: tensor
            for name, tensor in whole.items()
            if "lora" in name or not any(part in name for part in left_out)
        }
        save_file(kept, path, metadata={"format": "pt"})
        text = "\n".join(_wrong(base, adapter))
        assert [thing for thing in things if thing not in text] == []


@pytest.mark.parametrize(("tied", "shards"), [(True, "5GB"), (False, "20KB")])
def test_everything_grows_together(tmp_path: Path, tied: bool, shards: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = save_base(
        tmp_path / "source", make_tokenizer(), shard=shards, tie_word_embeddings=tied
    )
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
    assert len(model_files(folder)[1]) == len(model_files(source)[1])
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
    folder = save_base(tmp_path / "base", make_tokenizer())
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
