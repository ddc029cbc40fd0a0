"""ZeRO-3 with a vocabulary of real size, at which ranks compute their head in portions.

If the head were called once per portion, a rank with more portions would wait for a gather that the
others never start, until the collective timeout of `uneven_ranks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.commands import run_ranks
from tests.training.conftest import save_base
from tests.training.model.uneven_ranks import CASES

VOCABULARY = 151_936


def run(folder: Path, tokenizer, names: Sequence[str], *, tied: bool) -> Path:
    """Train these cases in one launch of two ranks; return their folder."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
    base = save_base(folder / "base", tokenizer, tie_word_embeddings=tied, **sizes)
    arguments = (str(folder), str(base), *names)
    run_ranks("tests.training.model.uneven_ranks", *arguments, log_path=folder / "log")
    return folder


def require_same(folder: Path, names: Sequence[str]) -> None:
    """Compare ZeRO-3 with ZeRO-0: log-probabilities, entropies and gradient norms."""
    for name in names:
        measures = json.loads((folder / f"{name}.json").read_text())
        for measure, expected in measures["0"].items():
            assert measures["3"][measure] == pytest.approx(expected, rel=2e-5), (name, measure)
        assert min(measures["0"]["norms"]) > 1e-3, name


@pytest.mark.slow
def test_ranks_of_very_different_lengths(tmp_path: Path, tokenizer) -> None:
    require_same(run(tmp_path, tokenizer, ["full"], tied=False), ["full"])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_kind_of_head(tmp_path: Path, tokenizer, tied: bool) -> None:
    # The table of the tied base has a row of zeros (its padding), by whose norm DoRA divides.
    names = [name for name in CASES if not (tied and name == "head-dora")]
    require_same(run(tmp_path, tokenizer, names, tied=tied), names)
    rows, frozen = (
        json.loads((tmp_path / f"{name}.json").read_text())["3"]["norms"]
        for name in ("rows", "frozen")
    )
    assert rows[0] > 1.01 * frozen[0]  # the trained rows have gradients of their own
