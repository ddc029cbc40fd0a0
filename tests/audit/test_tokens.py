"""Ids read from tokenizer.json by searching it are those that a parser and the library say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tasks.audit.checks.text.tokens import Tokens, read_tokens
from tasks.audit.folder import Folder

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
NASTY = [
    '"',
    '":1',
    '\\":7',
    "\\",
    '": 5,',
    "}",
    "</s>",
    "é",
    "日本",
    "merges",
    '"merges"',
    "vocab",
]
ONCE = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def saved(folder: Path, core: Tokenizer) -> Tokens:
    folder.mkdir(exist_ok=True)
    # A new name each time: what was read of a file is kept while it is not changed.
    path = folder / "tokenizer.json"
    path.unlink(missing_ok=True)
    core.save(str(path))
    return read_tokens(Folder(folder))


@ONCE
@given(texts=st.lists(TEXTS | st.sampled_from(NASTY), unique=True, min_size=1, max_size=20))
def test_a_mapping(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    vocabulary = {text: number * 3 for number, text in enumerate(texts)}
    folder = tmp_path_factory.mktemp("it")
    found = saved(folder, Tokenizer(models.BPE(vocabulary, [])))
    parsed = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert found.rows == max(parsed.values()) + 1
    assert found.highest_plain == found.rows - 1
    assert all(found.has(text) for text in texts)


@ONCE
@given(texts=st.lists(TEXTS | st.sampled_from(NASTY), unique=True, min_size=1, max_size=20))
def test_a_list(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = [(text, -1.5 * number) for number, text in enumerate(["<unk>", *texts])]
    found = saved(tmp_path_factory.mktemp("it"), Tokenizer(models.Unigram(pieces, 0, False)))
    assert found.rows == len(pieces)


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_other_kinds(kind: str, tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "##b": 7}
    core = Tokenizer(getattr(models, kind)(vocabulary, unk_token="[UNK]"))
    assert saved(tmp_path / "it", core).rows == 8


def test_added_tokens(tmp_path: Path) -> None:
    core = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    core.add_special_tokens(["<eos>"])
    core.add_tokens(["<tool>"])
    found = saved(tmp_path / "it", core)
    assert (found.rows, found.highest_plain) == (4, 1)
    assert found.added == {"<eos>": 2, "<tool>": 3}
    assert found.special == {"<eos>"}
    assert [found.id_of(one) for one in ("<eos>", "<tool>", "b", "c")] == [2, 3, 1, None]


def test_merges_are_no_ids(tmp_path: Path) -> None:
    core = Tokenizer(models.BPE({"a": 0, "9": 1, "a9": 2}, [("a", "9")]))
    assert saved(tmp_path / "it", core).rows == 3


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"model": {"vocab": 3}}', '{"added_tokens": [{"id": "x"}]}', "\x00" * 50,
     '{"added_tokens": ' + "[" * 5000],
)  # fmt: skip
def test_what_is_no_tokenizer_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_tokens(Folder(tmp_path)).rows == 0


def test_there_is_none(tmp_path: Path) -> None:
    assert read_tokens(Folder(tmp_path)) == Tokens()
