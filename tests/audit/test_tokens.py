"""Tokens and chat templates: ids of `tokenizer.json`, of the class that loads it, ends of turns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tasks.audit.checks.templates import EOS, read_template
from tasks.core.errors import ConfigError
from tasks.delivery.source import examine, open_folder, require_own_ids
from tasks.weights.tokens.prove_ids import misread
from tests.audit.making import codes, edit_json, make_model, tensors
from tests.tiny import TEMPLATE, save_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot|>", "<|header|>", "<end_of_turn>", "</s>")
LOOP = "{% for m in messages %}"
ENDS: dict[str, set[str]] = {
    TEMPLATE: {"<|im_end|>"},
    LOOP + "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}": {"<|im_end|>"},
    LOOP + "{{ m['content'] + eos_token }}{% endfor %}": {EOS},
    LOOP + "{{ '<|header|>' + m['content'] | trim + '<|eot|>' }}{% endfor %}": {"<|eot|>"},
    LOOP + "{% set content = '<|header|>' + m['content'] | trim + '<|eot|>' %}"
    "{{ content }}{% endfor %}": {"<|eot|>"},
    LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end_of_turn>"
    "{% endgeneration %}{% endif %}{% endfor %}": {"<end_of_turn>"},
    LOOP + "{{ m.content ~ '</s>' }}{% break %}{% endfor %}": {"</s>"},
    LOOP + "{{ m.content }}\n{% endfor %}": set(),
    LOOP + "{{ ('[' + m.content + '<|eot|>') if m.role else '' }}{% endfor %}": {"<|eot|>"},
}


def test_tokens_after_a_message() -> None:
    assert {text: read_template(text, SPECIAL).ends for text in ENDS} == ENDS


def test_a_template_is_not_run() -> None:
    text = read_template("<|a|>{{ '<|b|>' + x }}{# <|c|> #}{% if '<|d|>' in x %}{% endif %}", ())
    assert text.markers == {"<|a|>", "<|b|>"}
    bomb = "{% for a in range(99999) %}" * 5 + "{{ a }}" + "{% endfor %}" * 5
    assert read_template(bomb, ()).ends == set()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return a model with the tokenizer of the tests, as transformers saves it."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    more = {name: np.resize(tensors()[name], (300, 16)) for name in names}
    folder = make_model(tmp_path / "model", {**tensors(), **more}, vocab_size=300)
    save_tokenizer(folder)
    return folder


def test_the_fix_of_a_class_that_rebuilds_the_steps(llama: Path) -> None:
    edit_json(llama / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    assert codes(llama)["TOKENIZER_MISREAD"] == "error"
    source = open_folder(llama)
    assert "TOKENIZER_MISREAD" not in {finding.code for finding in examine(source).findings}
    with pytest.raises(ConfigError, match=str(llama)):  # what a delivery asks instead
        require_own_ids(llama)
    edit_json(llama / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert "TOKENIZER_MISREAD" not in codes(llama)
    assert misread(llama) == ""


def edit_tokenizer(folder: Path, step: str) -> None:
    """Change one step of a tokenizer, or add a token to it."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    model = document["model"]
    if step == "pre_tokenizer":
        document[step] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    elif step == "decoder":
        document[step] = {"type": "Fuse"}
    elif step == "merges":
        model["merges"] = [["a", "b"]]
    elif step == "a merge":
        model["vocab"]["ab"] = 300
    elif step == "vocabulary":
        model["vocab"]["a"], model["vocab"]["b"] = model["vocab"]["b"], model["vocab"]["a"]
    else:
        number = 1 + max(model["vocab"].values())
        added = {**document["added_tokens"][0], "id": number, "content": "<t>"}
        document["added_tokens"].append(added)
    path.write_text(json.dumps(document))


def test_a_tokenizer_that_is_not_the_bases(llama: Path, tmp_path: Path) -> None:
    for step in ("pre_tokenizer", "merges", "vocabulary", "decoder", "added"):
        base = shutil.copytree(llama, tmp_path / "base", dirs_exist_ok=True)
        edited = shutil.copytree(llama, tmp_path / step)
        for folder in (base, edited) if step == "merges" else ():
            edit_tokenizer(folder, "a merge")
        edit_tokenizer(edited, step)
        assert ("TOKENIZER_NOT_OF_BASE" in codes(edited, base=base)) is (step != "added"), step
