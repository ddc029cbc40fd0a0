"""The journal alone; `test_resume.py` tests the runs that use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.weights.execute.journal import JOURNAL, Journal, Outcome, identify, read_outcomes
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.plan.layout import as_is
from tests.weights.plans import make_inputs

ONE, TWO = (Outcome(name, "model.safetensors", "0" * 64) for name in ("one", "two"))


def test_a_full_disk_is_an_error_with_a_hint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "identity")
    (tmp_path / JOURNAL).unlink()
    (tmp_path / JOURNAL).symlink_to("/dev/full")
    with pytest.raises(ArtifactError, match="No space left on device") as raised:
        journal.enter(ONE)
    assert "paths.runs" in raised.value.hint
    assert journal.entries == 0
    (tmp_path / JOURNAL).with_suffix(".new").symlink_to("/dev/full")
    with pytest.raises(ArtifactError, match="No space left on device"):
        journal.begin([ONE])


@pytest.mark.parametrize("cut", [1, 20])
def test_a_torn_line_and_the_lines_after_it_are_ignored(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path, "identity")
    journal.enter(ONE)
    whole = (tmp_path / JOURNAL).read_bytes()
    journal.enter(TWO)
    (tmp_path / JOURNAL).write_bytes((tmp_path / JOURNAL).read_bytes()[:-cut])
    assert read_outcomes(tmp_path / JOURNAL, "identity") in ([ONE], [ONE, TWO][: 1 + (cut == 1)])
    (tmp_path / JOURNAL).write_bytes(whole[: whole.index(b"\n") // 2])
    assert read_outcomes(tmp_path / JOURNAL, "identity") == []


def test_a_journal_of_another_run_is_ignored(tmp_path: Path) -> None:
    Journal(tmp_path, "identity").enter(ONE)
    assert read_outcomes(tmp_path / JOURNAL, "another") == []
    assert read_outcomes(tmp_path / JOURNAL) == [ONE]
    assert Journal(tmp_path, "identity").recorded == {"one": ONE}
    assert Journal(tmp_path, "another").recorded == {}


def test_an_absent_input_is_named(tmp_path: Path) -> None:
    inputs: dict[str, SourceRef] = make_inputs(tmp_path)
    sources = open_sources(inputs)
    plan = as_is(sources["base"], "base")
    before = identify(plan, sources, "model")
    assert before == identify(plan, sources, "model")
    path = sources["base"].extents(plan.ops[0].key)[0].path
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{path}: cannot be read: No such file"):
        identify(plan, sources, "model")
