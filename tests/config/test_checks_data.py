"""Rows that an objective cannot read are refused before anything starts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from flows.cli.config import compose_config
from tasks.config.checks import data
from tasks.config.checks.objective import reference_answers


@cache
def _section() -> dict[str, Any]:
    section: dict[str, Any] = compose_config(["data=jsonl"]).settings["data"]
    return section


def section(*rows: dict[str, Any], at: Path | None = None, **changes: Any) -> dict[str, Any]:
    if at is not None:
        at.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes["path"] = str(at)
    return {**_section(), **changes}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXTS = {"prompt": "q", "chosen": "a", "rejected": "b"}
WHOLE = {"chosen": [message("user", "q"), message("assistant", "a")],
         "rejected": [message("user", "q"), message("assistant", "b")]}  # fmt: skip
CHAT = {"messages": WHOLE["chosen"]}
FITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dpo", TEXTS, {}),
    ("reward", {**TEXTS, "m": 1}, {"margin_key": "m"}),
    ("orpo", {"good": "a", "bad": "b", "prompt": "q"},
     {"chosen_key": "good", "rejected_key": "bad"}),
    ("kto", {"prompt": "q", "response": "a", "ok": 0}, {"label_key": "ok"}),
    ("sft", CHAT, {}),
    ("sft", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
     {}),
    ("sft", TEXTS, {"response_key": "chosen"}),
    ("sft", WHOLE, {"messages_key": "chosen"}),
    ("rloo", {"q": "q", "solution": 4}, {"prompt_key": "q", "answer_key": "solution"}),
    ("grpo", {"prompt": "q"}, {"answer_key": None}),
]  # fmt: skip


def test_rows_that_fit_pass(tmp_path: Path) -> None:
    problems = []
    for objective, row, changes in FITS:
        settings = section(row, row, at=tmp_path / "x.jsonl", **changes)
        problems += [(objective, str(f)) for f in data.readable(settings, objective)]
    assert problems == []


MISFITS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("dpo", {"prompt": "q", "choosen": "a", "rejected": "b"}, {},
     "'chosen'", "data.chosen_key=choosen"),
    ("dpo", CHAT, {}, "'chosen' and 'rejected'", "train=sft"),
    ("kto", CHAT, {}, "'label'", "train=sft"),
    ("kto", TEXTS, {}, "pairs", "train=reward|dpo|orpo|simpo"),
    ("reward", {**TEXTS, "m": 1}, {"margin_key": "margins"},
     "'margins'", "data.margin_key=<column>"),
    ("sft", TEXTS, {}, "pairs", "data.prompt_key=prompt data.response_key=chosen"),
    ("sft", WHOLE, {}, "pairs", "data.messages_key=chosen"),
    ("dpo", {**TEXTS, "rejected": "a"}, {}, "equal", "data.rejected_key"),
    ("grpo", {"prompt": "q", "solution": "a"}, {"answer_key": "solutions"},
     "'solutions'", "data.answer_key=solution"),
    ("sft", {"instruction": "a", "response": "b"}, {}, "'prompt'", "data.prompt_key=instruction"),
    ("sft", {"message": []}, {}, "'messages'", "data.messages_key=message"),
]  # fmt: skip


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    """Each with the column that it names and the setting that it suggests."""
    wrong = []
    for objective, row, changes, named, override in MISFITS:
        settings = section(row, row, at=tmp_path / "x.jsonl", **changes)
        findings = data.readable(settings, objective)
        if [named in f.found and override in f.override for f in findings] != [True]:
            wrong.append((objective, row, [str(f) for f in findings]))
    assert wrong == []


def test_a_file_without_readable_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text, named, override in (
        ("", "rows.jsonl", "data.path=<file>"),
        ("{broken\n", "rows.jsonl:1:", "data=jsonl|csv|parquet"),
    ):
        file.write_text(text)
        (finding,) = data.readable(section(path=str(file)))
        assert named in finding.found
        assert finding.override == override
    file.write_text('{broken\n{"messages": []}\n')
    assert data.readable(section(path=str(file), on_bad_line="skip")) == []


def test_data_files_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    wrong = str(tmp_path / "row.jsonl")
    settings = section(path=wrong, eval_path=str(tmp_path), chat_template=wrong)
    findings = {f.what: f for f in data.readable(settings)}
    assert list(findings) == ["data.chat_template", "data.path", "data.eval_path"]
    assert findings["data.path"].override == f"data.path={tmp_path}/rows.jsonl"
    (finding,) = data.readable(section())
    assert finding.override == "data.path=<file>"
    (finding,) = data.readable(section(kind="hub"))
    assert finding.override == "data.name=owner/name"


def test_all_problems_of_several_sources(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps(TEXTS) + "\n")
    (tmp_path / "bad.csv").write_text("prompt,chosen\nq,a\n")
    blank = dict.fromkeys(
        ["kind", "split", "probability", "max_samples", "rejected_key", "chosen_key"]
    )
    sources = [
        {**blank, "path": str(good), "probability": 0.5},
        {**blank, "path": str(tmp_path / "bad.csv"), "kind": "csv", "probability": 0.6},
        {**blank, "path": str(tmp_path / "none.jsonl"), "max_samples": 0},
    ]
    findings = data.readable(section(sources=sources, path="x.jsonl"), "dpo")
    assert [f.what for f in findings] == [
        "data.sources", "data.sources", "data.rejected_key", "data.sources[2].path",
        "data.sources[2].path",
    ]  # fmt: skip
    fine = [{**blank, "path": str(good)}, {**blank, "path": str(good)}]
    assert data.readable(section(sources=fine), "dpo") == []


def compared(settings: dict[str, Any], *, function: str = "exact_match") -> list[Any]:
    reward = {"function": function}
    return list(
        reference_answers({"train": {"objective": "grpo"}, "reward": reward, "data": settings})
    )


def test_exact_match_needs_reference_answers(tmp_path: Path) -> None:
    bare = section({"prompt": "q", "solution": 4}, {"prompt": "r"}, at=tmp_path / "bare.jsonl")
    (finding,) = compared(bare)
    assert finding.what == "reward.function"
    assert "prompt, solution" in finding.allowed
    assert "data.answer_key=<column>" in finding.override
    assert compared({**bare, "answer_key": "solution"}) == [], "some have one; prepare counts"
    assert compared(bare, function="judge.py:score") == []
    chat = section({"messages": WHOLE["chosen"]}, at=tmp_path / "chat.jsonl")
    assert compared(chat) == []
    mixed = {**bare, "path": None, "sources": [{"path": chat["path"]}, {"path": bare["path"]}]}
    (finding,) = compared(mixed)
    assert "bare.jsonl" in finding.found
    assert compared({**bare, "path": str(tmp_path / "nowhere.jsonl")}) == [], "said elsewhere"
