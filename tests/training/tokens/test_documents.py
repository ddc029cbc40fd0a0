"""Raw texts to tokens: each bears loss once, whatever the length of a piece."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import ConfigError, DataError
from tasks.training.model.build import load_tokenizer
from tasks.training.tokens.chat import Unfit
from tasks.training.tokens.count_truncated import SingleRank
from tasks.training.tokens.data import load_split
from tasks.training.tokens.documents import Document, TextEncoder, pieces
from tasks.training.tokens.example_spec import CONVERSATIONS
from tasks.training.tokens.examples import Tokens
from tests.training.conftest import make_tokenizer
from tests.training.datasets import answer, data_events, job_for, load, user, write

TEXTS = [{"id": "a", "text": "to be or not"}, {"id": "b", "text": "x"}, {"id": "c", "text": "é\n "}]


class WithBos:
    """A tokenizer whose texts begin with id 7, as Llama's begin with a BOS token."""

    eos_token_id = 5

    def __call__(self, texts: list[str], verbose: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[7, *text.encode()] for text in texts]}


def test_texts_end_with_eos_and_all_tokens_but_the_first_bear_loss() -> None:
    tokenizer = make_tokenizer()
    (tokens,) = TextEncoder(tokenizer).encode([Document("ab")])
    assert not isinstance(tokens, Unfit)
    assert tokenizer.convert_ids_to_tokens(tokens.ids.tolist()) == ["a", "b", "<|im_end|>"]
    assert tokens.bears.tolist() == [0, 1, 1]
    (tokens,) = TextEncoder(WithBos()).encode([Document("ab")])
    assert (list(tokens.ids), list(tokens.bears)) == ([7, 97, 98, 5], [0, 1, 1, 1])
    assert TextEncoder(tokenizer).encode([]) == []
    (nothing,) = TextEncoder(tokenizer).encode([Document("")])
    assert isinstance(nothing, Unfit)


@given(count=st.integers(2, 60), max_len=st.integers(2, 12))
def test_pieces_have_every_token_and_each_bears_loss_once(count: int, max_len: int) -> None:
    whole = Tokens(np.arange(count, dtype=np.int32), np.ones(count, np.uint8))
    parts = list(pieces(whole, max_len))
    assert all(2 <= len(piece.ids) <= max_len for piece in parts)
    learnt = [int(i) for piece in parts for i in np.asarray(piece.ids)[np.asarray(piece.bears) > 0]]
    assert learnt == list(range(1, count))
    assert all(a.ids[-1] == b.ids[0] for a, b in pairwise(parts))


class TestSplit:
    """The same through `load_split`."""

    def job(self, folder: Path, base: Path, rule: str, max_len: int, mask: str = "every_token"):
        write(folder, TEXTS)
        return job_for(folder, base, mask=mask, max_len=max_len, batch={"on_overlong": rule})

    def learnt(self, examples: Any, tokenizer: Any) -> str:
        runs = [examples.sequence(i, 0) for i in range(len(examples))]
        return "".join(tokenizer.decode(ids[bears > 0]) for ids, bears in runs)

    def test_long_texts_are_cut_into_pieces_without_loss(
        self, base: Path, tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        job = self.job(tmp_path, base, "split", 5)
        examples = load(job, CONVERSATIONS)
        assert (
            self.learnt(examples, tokenizer) == "o be or not<|im_end|><|im_end|>\ufffd\n <|im_end|>"
        )
        assert examples.lengths[:, 0].tolist() == [5, 5, 5, 2, 5]  # 13, 2 and 5 tokens
        assert list(examples.names) == ["a+0", "a+1", "a+2", "b", "c"]
        (event,) = data_events(capfd)
        assert (event["read"], event["kept"], event["in_pieces"]) == (3, 5, 1)
        assert (event["truncated"], event["refused"]) == (0, 0)

    def test_long_texts_are_truncated_or_refused_and_counted(
        self, base: Path, tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        job = replace(self.job(tmp_path / "cut", base, "truncate", 5), max_truncated=0.34)
        cut = load(job, CONVERSATIONS)
        assert cut.lengths[:, 0].tolist() == [5, 2, 5]
        left = load(self.job(tmp_path / "left", base, "refuse", 5), CONVERSATIONS)
        assert left.lengths[:, 0].tolist() == [2, 5]
        events = data_events(capfd)
        assert [(e["truncated"], e["ends_cut"], e["refused"]) for e in events] == [
            (1, 1, 0), (0, 0, 1),
        ]  # fmt: skip
        assert [line.partition(":")[0] for line in events[1]["left_out"]] == ["a"]

    def test_a_template_is_not_needed_and_another_mask_is_refused(
        self, base: Path, tmp_path: Path
    ) -> None:
        job = self.job(tmp_path, base, "split", 64)
        tokenizer: Any = load_tokenizer(job)
        tokenizer.chat_template = None
        ranks: Any = SingleRank()
        examples = load_split(job, "train", roles=CONVERSATIONS, tokenizer=tokenizer, ranks=ranks)
        assert len(examples) == 3
        with pytest.raises(ConfigError, match=r"train\.mask=last_answer") as caught:
            load(self.job(tmp_path / "other", base, "split", 64, "last_answer"), CONVERSATIONS)
        assert caught.value.hint == "train.mask=every_token"

    def test_only_texts_are_cut_into_pieces_and_do_not_mix(
        self, base: Path, tmp_path: Path
    ) -> None:
        job = self.job(tmp_path, base, "split", 64)
        write(tmp_path, [*TEXTS, {"id": "d", "messages": []}])
        with pytest.raises(DataError, match="first d"):
            load(job, CONVERSATIONS)
        write(tmp_path, [{"id": "d", "messages": [user("q"), answer("a")]}])
        with pytest.raises(ConfigError, match="split"):
            load(job, CONVERSATIONS)
