"""Control tokens in texts: refused in answers, reported elsewhere, kept if so set."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.core.errors import DataError
from tasks.prepare import data_settings, prepare_data

LOG = logging.getLogger("tests.control")
END = "<|im_end|>"
THINK = "<think>hm</think>"  # an added token that is not special
MULTI = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": f"b{END}c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": f"{THINK}e"},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    added: list[dict[str, Any]] = [
        {"id": 300, "content": END, "special": True},
        {"id": 301, "content": "<think>", "special": False},
        {"id": 302, "content": "<end>", "special": False},
        {"id": 303, "content": "!", "special": True},
    ]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [300, 302]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": END}, "pad_token": "!", "unk_token": None,
                    "extra_special_tokens": {"image": "<image>"}})
    )  # fmt: skip
    return folder


def _settings(model: Path, row: dict[str, Any], train: str, *more: str) -> dict[str, Any]:
    file = model.parent / "rows.jsonl"
    good = [{k: _other(v, n) for k, v in row.items()} for n in range(3)]
    file.write_text("".join(json.dumps(r) + "\n" for r in (*good, row)))
    typed = [f"train={train}", f"data.path={file}", f"model.path={model}", *more]
    return compose_config(typed).settings


def _other(value: Any, number: int) -> Any:
    if isinstance(value, list):
        return [{**m, "content": f"{m['role']} {number}"} for m in value]
    return f"{value[:1]}{number}" if isinstance(value, str) else value


def _prepared(settings: dict[str, Any], out: Path) -> str:
    out.mkdir()
    prepare_data(out, log=LOG, **data_settings(settings))
    return "".join((out / f"{name}.jsonl").read_text() for name in ("train", "heldout"))


CASES = [
    # row, objective, settings, refused in answers
    ({"prompt": "question", "response": f"a{END}"}, "sft", [], True),
    ({"prompt": f"question{END}", "response": "a"}, "sft", [], False),
    ({"prompt": "question <image>", "response": "a"}, "sft", ["data.control_tokens=refuse"], True),
    ({"messages": MULTI}, "sft", ["train.mask=last_answer"], False),
    ({"prompt": "question", "chosen": "a", "rejected": f"b{END}"}, "dpo", [], True),
    ({"prompt": "question", "response": f"a{END}", "label": True}, "kto", [], True),
    ({"prompt": f"question{END}"}, "grpo", [], False),
]


@pytest.mark.parametrize(("row", "train", "more", "refused"), CASES)
def test_rows_with_control_tokens(
    model: Path,
    caplog: pytest.LogCaptureFixture,
    row: dict[str, Any],
    train: str,
    more: list[str],
    refused: bool,
) -> None:
    settings = _settings(model, row, train, *more)
    if refused:
        with pytest.raises(DataError, match=r"rows\.jsonl:4: "):
            _prepared(settings, model.parent / "out")
    else:
        assert _prepared(settings, model.parent / "out")
        assert [r.levelname for r in caplog.records if "rows.jsonl:4: " in r.message] == ["WARNING"]
    settings["data"]["control_tokens"] = "keep"
    text = _prepared(settings, model.parent / "keep")
    assert any(token in text for token in (END, "<image>"))


def test_texts_without_control_tokens_are_taken(model: Path) -> None:
    """Tokens that are not special, one of a single letter, and reference answers of prompts."""
    answered = [{"role": "user", "content": "b"}, {"role": "assistant", "content": END}]
    for number, (row, train, kept) in enumerate((
        ({"prompt": "question! <im_end>", "response": f"{THINK}a!"}, "sft", THINK),
        ({"messages": answered}, "grpo", f'"answer": "{END}"'),
    )):  # fmt: skip
        settings = _settings(model, row, train)
        assert kept in _prepared(settings, model.parent / f"out{number}")
