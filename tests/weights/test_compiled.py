"""C kernels are compiled once and cached; without a compiler there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.weights.native import binding
from tasks.weights.native.binding import compiled

SOURCE = "int twice(int n) { return 2 * n; }\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_folder", lambda: tmp_path / "kept")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "twice.c"
    path.write_text(SOURCE)
    return path


def test_it_works(source: Path) -> None:
    kernels = compiled(source)
    assert kernels is not None
    assert kernels.twice(21) == 42


def test_without_a_compiler_there_are_none(monkeypatch, caplog, source: Path) -> None:
    monkeypatch.setattr(binding.shutil, "which", lambda name: None)
    with caplog.at_level("INFO", logger=binding.__name__):
        assert compiled(source) is None
    assert "no C compiler: merging LoRA is slower" in caplog.text


def test_a_failing_compiler_is_logged(monkeypatch, tmp_path, caplog, source: Path) -> None:
    monkeypatch.setattr(binding, "FLAGS", ("--no-such-flag",))
    assert compiled(source) is None
    assert "cannot be compiled (merging LoRA is slower)" in caplog.text
    assert "no-such-flag" in caplog.text
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_library_that_does_not_load_is_logged(caplog, source: Path) -> None:
    source.write_text("int missing(void); int twice(int n) { return missing() * n; }")
    assert compiled(source) is None
    assert "undefined symbol: missing" in caplog.text


def test_compiled_once_and_found_again(monkeypatch, tmp_path, source: Path) -> None:
    assert compiled(source) is not None
    (made,) = (tmp_path / "kept").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(binding.subprocess, "run", None)  # would be called to compile
        assert compiled(source) is not None
    assert list((tmp_path / "kept").iterdir()) == [made]
    source.write_text(SOURCE.replace("2 * n", "n + n"))
    assert compiled(source) is not None
    assert len(list((tmp_path / "kept").iterdir())) == 2
