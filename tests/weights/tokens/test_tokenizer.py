"""What a tokenizer says of a model: its rows, the ids that end a response, its chat template."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.weights.tokens.render_template import MAX_CHARACTERS
from tasks.weights.tokens.tokenizer import read_tokenizer, require_bounded_template, token_ids
from tests.weights.making import TEMPLATE, save_tokenizer


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
    template.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert read_tokenizer(folder).stops == [0], "no special token after the answer"
    template.write_text(IGNORING_SYSTEM)
    assert read_tokenizer(folder).end_of_turn == 2
    template.unlink()
    facts = read_tokenizer(folder)
    assert (facts.template, facts.end_of_turn) == ("", None)
    _settings(folder, chat_template=[{"name": "default", "template": TEMPLATE}])
    assert read_tokenizer(folder).end_of_turn == 2
    _settings(folder, eos_token={"content": "<|im_end|>", "special": True}, pad_token=None)
    facts = read_tokenizer(folder)
    assert (facts.stops, facts.pad) == ([2], None)


def test_a_broken_template_is_refused(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    for text in (
        "{% for %}",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
        "hello",
        "{{ 1 / 0 }}",
        "{{ messages[0] + 1 }}",
    ):
        path.write_text(text)
        with pytest.raises(ArtifactError, match="template"):
            read_tokenizer(folder)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja"):
        read_tokenizer(folder)
    path.write_text("{{ raise_exception('roles must alternate') }}")
    require_bounded_template(folder)  # of a base it is left to its users


def test_a_missing_eos_or_tokenizer_is_refused(folder: Path) -> None:
    for eos in (None, "</s>"):
        _settings(folder, eos_token=eos)
        with pytest.raises(ArtifactError, match=eos or "eos_token"):
            read_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'a' * 3000000000 }}",
        "{% set ns = namespace(t='a') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}"
        "{% endfor %}{{ ns.t }}",
        "x" * (MAX_CHARACTERS + 1),
    ],
    ids=["loops", "product", "doubling", "length"],
)
def test_a_template_without_bounds_is_refused(folder: Path, bomb: str) -> None:
    place = "tokenizer_config.json" if bomb.startswith("x") else "chat_template.jinja"
    (folder / "chat_template.jinja").unlink()
    if place == "chat_template.jinja":
        (folder / place).write_text(bomb)
    else:
        _settings(folder, chat_template=bomb)
    began = time.monotonic()
    endless = bomb.startswith("{% for")  # takes the whole time that is allowed
    for refuse in (read_tokenizer,) if endless else (read_tokenizer, require_bounded_template):
        with pytest.raises(ArtifactError, match=place):
            refuse(folder)
    assert time.monotonic() - began < 150  # the machine may be busy
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # kilobytes


def test_a_tokenizer_with_values_of_other_types(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    for changes in (
        {"added_tokens": 3},
        {"added_tokens": [3]},
        {"added_tokens": [{"content": "a"}]},
        {"added_tokens": [{"content": "a", "id": "x", "special": True}]},
        {"model": 3},
        {"model": {"vocab": {"a": [1]}}},
        {"model": {"vocab": {"a": float("inf")}}},
        {"model": {"vocab": {}}, "added_tokens": []},
    ):
        path.write_text(json.dumps({**document, **changes}))
        for read in (read_tokenizer, token_ids):
            with pytest.raises(ArtifactError, match="tokenizer"):
                read(folder)
