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


def test_one_stop_where_the_turn_ends_with_eos(folder: Path) -> None:
    _settings(folder, eos_token={"content": "<|im_end|>", "special": True}, pad_token=None)
    facts = read_tokenizer(folder)
    assert facts.stops == [2]
    assert facts.pad is None


def test_a_template_without_a_special_token_after_the_answer(folder: Path) -> None:
    text = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)
    assert read_tokenizer(folder).stops == [0]


def test_generation_blocks_and_loop_controls(folder: Path) -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(text)
    assert read_tokenizer(folder).end_of_turn == 2


def test_a_template_inside_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    _settings(folder, chat_template=[{"name": "default", "template": TEMPLATE}])
    assert read_tokenizer(folder).end_of_turn == 2


def test_no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    facts = read_tokenizer(folder)
    assert (facts.template, facts.end_of_turn) == ("", None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "does not render"),
        ("{{ raise_exception('no') }}", "does not render: no"),
        ("{{ messages.__class__.__mro__ }}", "does not render"),
        ("hello", "drops the assistant's answer"),
    ],
)
def test_a_broken_template_is_refused(folder: Path, template: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ArtifactError, match=message):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"eos_token": None}, "names no eos_token"), ({"eos_token": "</s>"}, "'</s>' has no id")],
)
def test_a_missing_eos_is_refused(folder: Path, change: dict, message: str) -> None:
    _settings(folder, **change)
    with pytest.raises(ArtifactError, match=message):
        read_tokenizer(folder)


def test_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{{ 1 / 0 }}", "{{ messages[0] + 1 }}", "{{ [1].index(2) }}"])
def test_a_template_that_fails_in_python_is_refused(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)
    with pytest.raises(ArtifactError, match="the chat template does not render"):
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
)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_without_bounds_is_refused(folder: Path, bomb: str, place: str) -> None:
    (folder / "chat_template.jinja").unlink()
    if place == "chat_template.jinja":
        (folder / place).write_text(bomb)
    else:
        _settings(folder, chat_template=bomb)
    began = time.monotonic()
    for refuse in (read_tokenizer, require_bounded_template):
        with pytest.raises(ArtifactError, match=place):
            refuse(folder)
    assert time.monotonic() - began < 150  # the machine may be busy
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20  # kilobytes


def test_a_faulty_template_of_a_base_is_left_to_its_users(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    require_bounded_template(folder)


def test_a_template_that_is_not_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="chat_template.jinja: not UTF-8"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": 3}, {"added_tokens": [3]}, {"added_tokens": [{"content": "a"}]},
        {"added_tokens": [{"content": "a", "id": "x", "special": True}]}, {"model": 3},
        {"model": {"vocab": {"a": [1]}}}, {"model": {"vocab": {"a": float("inf")}}},
        {"model": {"vocab": {}}, "added_tokens": []},
    ],
)  # fmt: skip
def test_a_tokenizer_with_values_of_other_types(folder: Path, changes: dict) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    for read in (read_tokenizer, token_ids):
        with pytest.raises(ArtifactError, match="tokenizer"):
            read(folder)
