"""Literal text of chat templates, read without rendering."""

from __future__ import annotations

import time

import pytest

from tasks.audit.checks.text.template_text import EOS, MAX_BYTES, BrokenTemplateError, read_template
from tests.weights.making import TEMPLATE

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot|>", "<|header|>", "<end_of_turn>", "</s>")
LOOP = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TEMPLATE, {"<|im_end|>"}),
        (LOOP + "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}", {"<|im_end|>"}),
        (LOOP + "{{ m['content'] + eos_token }}{% endfor %}", {EOS}),
        (LOOP + "{{ '<|header|>' + m['content'] | trim + '<|eot|>' }}{% endfor %}", {"<|eot|>"}),
        (
            LOOP + "{% set content = '<|header|>' + m['content'] | trim + '<|eot|>' %}"
            "{{ content }}{% endfor %}",
            {"<|eot|>"},
        ),
        (
            LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end_of_turn>"
            "{% endgeneration %}{% endif %}{% endfor %}",
            {"<end_of_turn>"},
        ),
        (LOOP + "{{ m.content ~ '</s>' }}{% break %}{% endfor %}", {"</s>"}),
        (LOOP + "{{ m.content }}\n{% endfor %}", set()),
        (LOOP + "{{ ('[' + m.content + '<|eot|>') if m.role else '' }}{% endfor %}", {"<|eot|>"}),
    ],
)  # fmt: skip
def test_tokens_after_a_message(template: str, ends: set[str]) -> None:
    assert read_template(template, SPECIAL).ends == ends


def test_markers_look_like_special_tokens() -> None:
    text = read_template("<|a|>{{ '<|b|>' + x }}{# <|c|> #}{% if '<|d|>' in x %}{% endif %}", ())
    assert text.markers == {"<|a|>", "<|b|>"}


def test_a_template_is_not_run() -> None:
    began = time.monotonic()
    bomb = "{% for a in range(99999) %}" * 5 + "{{ a }}" + "{% endfor %}" * 5
    assert read_template(bomb, ()).ends == set()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ a", "{% nothing %}", "{{ " + "(" * 3000 + " }}", "x" * (MAX_BYTES + 1),
     "{% if a %}" * 2000 + "{% endif %}" * 2000, "{{ a" + " + a" * 4000 + " }}"],
)  # fmt: skip
def test_templates_that_do_not_parse(template: str) -> None:
    with pytest.raises(BrokenTemplateError):
        read_template(template, SPECIAL)
