"""Tokenised examples from rows and texts of every kind, made once and again after changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import DataError
from tasks.train import check_rows
from tasks.training.model.build import load_tokenizer
from tasks.training.tokens.chat import Unfit, encode_texts
from tasks.training.tokens.data import CONVERSATIONS, LABELLED, PAIRS
from tasks.training.tokens.examples import Tokens
from tasks.training.tokens.truncation import pieces
from tests.settings import Batch, Settings
from tests.tiny import make_tokenizer
from tests.training.datasets import (
    Row,
    answer,
    data_events,
    job_for,
    load,
    pair,
    texts,
    user,
    write,
)


def load_rows(folder: Path, base: Path, rows: list[Row], roles: tuple[str, ...], **how: Any):
    """Write rows and tokenise them, with changed settings."""
    write(folder, rows)
    return load(job_for(folder, base, **how), roles)


def test_pairs(base: Path, tmp_path: Path, tokenizer) -> None:
    rows = [pair("a", "q", "good", "bad", margin=0.5), pair("b", "z", "x", "y", margin=2)]
    examples = load_rows(tmp_path, base, rows, PAIRS)
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    assert texts(examples, tokenizer) == [
        [(start("q"), "good<|im_end|>"), (start("q"), "bad<|im_end|>")],
        [(start("z"), "x<|im_end|>"), (start("z"), "y<|im_end|>")],
    ]
    assert examples.values["margin"].tolist() == [0.5, 2.0]
    assert list(examples.names) == ["a", "b"]
    assert examples.supervised.tolist() == [[5, 4], [2, 2]]


def test_labelled_answers_and_their_mismatches(base: Path, tmp_path: Path, tokenizer) -> None:
    rows = [
        {"id": str(i), "messages": [user(q), answer(a)], "desirable": i % 2 == 0}
        for i, (q, a) in enumerate([("q1", "a"), ("q1", "b"), ("q2", "a"), ("q3", "c")] * 3)
    ]
    examples = load_rows(tmp_path, base, rows, LABELLED)
    assert examples.values["desirable"].tolist() == [1.0, 0.0] * 6
    known = {(r["messages"][0]["content"], r["messages"][1]["content"]) for r in rows}
    for (prompt, own), (same, other) in texts(examples, tokenizer):
        assert prompt == same
        assert own != other
        question = prompt.removeprefix("<|im_start|>user\n").partition("<")[0]
        foreign = {a for q, a in known if q != question}
        assert other.removesuffix("<|im_end|>") in foreign
    alike = [{**row, "messages": [user(row["id"]), answer("a")]} for row in rows]
    with pytest.raises(DataError, match=r"12 samples.*first 0"):  # no other answer anywhere
        load_rows(tmp_path, base, alike, LABELLED)


@pytest.mark.parametrize(
    ("how", "count", "without_loss"), [({"mask": "last_answer"}, 2, 1), ({}, 4, 0)]
)
def test_masks(
    base: Path, tmp_path: Path, capfd, how: dict[str, str], count: int, without_loss: int
) -> None:
    """Without a setting all answers bear loss, as users of TRL and LLaMA-Factory expect."""
    rows = [{"id": "x", "messages": [user("a"), answer("b"), user("c"), answer("d")]}]
    examples = load_rows(tmp_path, base, rows, CONVERSATIONS, max_len=200, **how)
    assert examples.supervised.tolist() == [[count]]
    (told,) = data_events(capfd)
    assert told["without_loss"] == without_loss
    whole = load_rows(tmp_path, base, rows, CONVERSATIONS, mask="every_token", max_len=200)
    assert whole.supervised.tolist() == (whole.lengths - 1).tolist()


LONG, SHORT = "x" * 300, [user("hi"), answer("yes")]
GRPO = {"objective": "grpo", "online": {"rollout": {"max_prompt_len": 200}}}


@pytest.mark.parametrize(
    ("how", "messages", "template", "named"),
    [
        ({}, [user(LONG), answer("no")], None, r"s2400: prompt of .* up to 2000 rows"),
        (GRPO, [user(LONG)], None, r"s2400: \d+ tokens, more than rollout.max_prompt_len=200"),
        (GRPO, [user(LONG)], "{{ raise_exception('no') }}", "s0: .* rejects it"),
        ({"on_overlong": "refuse"}, [user(LONG), answer("no")], None, None),
    ],
)
def test_rows_of_a_later_step_are_refused_before_the_first_trains(
    base: Path, tmp_path: Path, capfd, how: Any, messages: Any, template: str | None, named: str
) -> None:
    """One of 2,500 rows is too long: it is found among the longest."""
    rows = [{"id": f"s{n}", "messages": messages if n == 2400 else SHORT} for n in range(2500)]
    for split in ("train", "heldout"):
        write(tmp_path, rows if split == "train" else rows[:2], split)
    file = None
    if template is not None:
        file = tmp_path / "template.jinja"
        file.write_text(template)
    batch = Batch(max_len=256, on_overlong=how.get("on_overlong", "truncate"))
    settings = Settings(batch=batch, **{k: v for k, v in how.items() if k != "on_overlong"})
    caught = nullcontext() if named is None else pytest.raises(DataError, match=named)
    with caught:
        check_rows(settings, base, tmp_path, file, 0.0)
    assert not data_events(capfd)


def test_every_bad_row_is_named_in_one_error(base: Path, tmp_path: Path) -> None:
    rows = [pair(f"s{i}", "q", "x" * (1 + i), "y") for i in range(30)]
    for number in (3, 7):
        rows[number]["chosen"] = []
    rows[9] = {"id": "s9", "prompt": "q"}
    with pytest.raises(DataError, match=r"3 samples.*first s3") as caught:
        load_rows(tmp_path, base, rows, PAIRS)
    assert [line.partition(":")[0] for line in caught.value.details] == ["s3", "s7", "s9"]
    assert not list(tmp_path.rglob("*.npy"))


def test_mostly_truncated_training_rows_are_refused(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cached or not; the event "data" has the counts, and evaluation rows are only counted."""
    rows = [pair(str(i), "q", "x" * (40 if i < 3 else 4), "y") for i in range(4)]
    for split in ("train", "heldout"):
        write(tmp_path, rows, split)
    job = job_for(tmp_path, base, max_len=40)
    for _ in range(2):
        with pytest.raises(DataError, match=r"3 of 4 rows .* data\.max_truncated=0\.2") as no:
            load(job, PAIRS)
        longest = int(no.value.hint.partition(" ")[0].removeprefix("train.max_len="))
    load(replace(job, max_truncated=0.75), PAIRS)
    load(job, PAIRS, split="heldout")
    whole = load(job_for(tmp_path, base, max_len=longest), PAIRS)
    assert whole.lengths.max() == longest
    events = data_events(capfd)
    assert [(e["split"], e["cached"], e["truncated"]) for e in events] == [
        ("train", False, 3), ("train", True, 3), ("train", True, 3), ("heldout", False, 3),
        ("train", False, 0),
    ]  # fmt: skip
    assert events[0]["tokens_cut"] == 3 * (longest - 40)


def test_the_datas_own_chat_template_is_the_one_trained_with(base: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    job = job_for(tmp_path, base)
    bases_own = load_tokenizer(job).chat_template
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(job)
    assert bases_own != tokenizer.chat_template == template
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == template
    tokenizer.chat_template = None
    write(tmp_path, [pair("a", "q", "x", "y")])
    with pytest.raises(DataError) as caught:
        load(job, PAIRS, tokenizer)
    assert "data.chat_template=" in caught.value.hint


TEXTS = [{"id": "a", "text": "to be or not"}, {"id": "b", "text": "x"}, {"id": "c", "text": "é\n "}]


def test_texts_end_with_eos_and_all_tokens_but_the_first_bear_loss() -> None:
    tokenizer = make_tokenizer()
    (tokens,) = encode_texts(tokenizer, ["ab"])
    assert not isinstance(tokens, Unfit)
    assert tokenizer.convert_ids_to_tokens(tokens.ids.tolist()) == ["a", "b", "<|im_end|>"]
    assert tokens.bears.tolist() == [0, 1, 1]
    (nothing,) = encode_texts(tokenizer, [""])
    assert isinstance(nothing, Unfit)


@given(count=st.integers(2, 60), max_len=st.integers(2, 12))
def test_pieces_have_every_token_and_each_bears_loss_once(count: int, max_len: int) -> None:
    whole = Tokens(np.arange(count, dtype=np.int32), np.ones(count, np.uint8))
    parts = list(pieces(whole, max_len))
    assert all(2 <= len(piece.ids) <= max_len for piece in parts)
    learnt = [int(i) for piece in parts for i in np.asarray(piece.ids)[np.asarray(piece.bears) > 0]]
    assert learnt == list(range(1, count))
    assert all(a.ids[-1] == b.ids[0] for a, b in pairwise(parts))


def test_long_texts_are_cut_into_pieces_without_loss(
    base: Path, tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    how = {"mask": "every_token", "max_len": 5, "batch": {"on_overlong": "split"}}
    examples = load_rows(tmp_path, base, TEXTS, CONVERSATIONS, **how)
    runs = [examples.sequence(i, 0) for i in range(len(examples))]
    learnt = "".join(tokenizer.decode(ids[bears > 0]) for ids, bears in runs)
    assert learnt == "o be or not<|im_end|><|im_end|>\ufffd\n <|im_end|>"
    assert examples.lengths[:, 0].tolist() == [5, 5, 5, 2, 5]  # 13, 2 and 5 tokens
    assert list(examples.names) == ["a+0", "a+1", "a+2", "b", "c"]
    (event,) = data_events(capfd)
    assert (event["read"], event["kept"], event["in_pieces"]) == (3, 5, 1)
    assert (event["truncated"], event["refused"]) == (0, 0)


def test_texts_need_no_template(base: Path, tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    job = job_for(tmp_path, base, mask="every_token")
    tokenizer: Any = load_tokenizer(job)
    tokenizer.chat_template = None
    assert len(load(job, CONVERSATIONS, tokenizer)) == 3
