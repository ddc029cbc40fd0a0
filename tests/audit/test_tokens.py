"""Token ids found by searching tokenizer.json agree with a parser and the library."""

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
    # A new file each time: results are cached by path and time of change.
    path = folder / "tokenizer.json"
    path.unlink(missing_ok=True)
    core.save(str(path))
    return read_tokens(Folder(folder))


@ONCE
@given(texts=st.lists(TEXTS | st.sampled_from(NASTY), unique=True, min_size=1, max_size=20))
def test_a_mapping(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    vocabulary = {text: number * 3 for number, text in enumerate(texts)}
    folder = tmp_path_factory.mktemp("it")
    tokens = saved(folder, Tokenizer(models.BPE(vocabulary, [])))
    parsed = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokens.rows == max(parsed.values()) + 1
    assert tokens.highest_plain == tokens.rows - 1
    assert all(tokens.has(text) for text in texts)


@ONCE
@given(texts=st.lists(TEXTS | st.sampled_from(NASTY), unique=True, min_size=1, max_size=20))
def test_a_list(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = [(text, -1.5 * number) for number, text in enumerate(["<unk>", *texts])]
    tokens = saved(tmp_path_factory.mktemp("it"), Tokenizer(models.Unigram(pieces, 0, False)))
    assert tokens.rows == len(pieces)


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_other_kinds(kind: str, tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "##b": 7}
    core = Tokenizer(getattr(models, kind)(vocabulary, unk_token="[UNK]"))
    assert saved(tmp_path / "it", core).rows == 8


def test_added_tokens(tmp_path: Path) -> None:
    core = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    core.add_special_tokens(["<eos>"])
    core.add_tokens(["<tool>"])
    tokens = saved(tmp_path / "it", core)
    assert (tokens.rows, tokens.highest_plain) == (4, 1)
    assert tokens.added == {"<eos>": 2, "<tool>": 3}
    assert tokens.special == {"<eos>"}
    assert [tokens.id_of(token) for token in ("<eos>", "<tool>", "b", "c")] == [2, 3, 1, None]


def test_merges_are_not_ids(tmp_path: Path) -> None:
    core = Tokenizer(models.BPE({"a": 0, "9": 1, "a9": 2}, [("a", "9")]))
    assert saved(tmp_path / "it", core).rows == 3


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"model": {"vocab": 3}}', '{"added_tokens": [{"id": "x"}]}', "\x00" * 50,
     '{"added_tokens": ' + "[" * 5000],
)  # fmt: skip
def test_an_invalid_tokenizer_gives_no_ids(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_tokens(Folder(tmp_path)).rows == 0


def test_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokens(Folder(tmp_path)) == Tokens()
