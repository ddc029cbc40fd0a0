"""`verify=<public key>`: findings about a folder's signature."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.audit.repair import repair
from tasks.audit.run import audit
from tasks.pipeline.signature import sign
from tests.audit.making import by_code, edit_json, make_model, make_shards, tensors
from tests.keys import make_pair


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_pair(tmp_path / "keys")


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    root = make_shards(tmp_path / "it")
    sign(root, keys[0])
    return root


def added_by(root: Path, key: Path) -> dict[str, str]:
    """Return the findings that the key adds to those of an audit without it, by code."""
    with_key = by_code(audit(root, public_key=key))
    without = by_code(audit(root))
    return {code: with_key[code] for code in with_key.keys() - without.keys()}


def test_a_signature_that_holds_is_no_finding(signed: Path, keys: tuple[Path, Path]) -> None:
    codes = by_code(audit(signed))
    assert codes.pop("SIGNATURE_UNCHECKED") == "info"
    assert by_code(audit(signed, public_key=keys[1])) == codes
    (signed / "model.sig").unlink()
    assert by_code(audit(signed)) == codes  # the file itself upsets no other check


def test_each_way_to_break_it_has_a_code_and_names_the_file(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    assert added_by(signed, make_pair(tmp_path, "other")[1]) == {"SIGNED_BY_ANOTHER": "error"}
    edit_json(signed / "config.json", rms_norm_eps=1e-5)
    (signed / "generation_config.json").write_text("{}")
    report = audit(signed, public_key=keys[1])
    files = {each.code: each.file for each in report.findings if each.code.startswith("SIGN")}
    assert files == {"SIGNED_CHANGED": "config.json", "SIGNED_ADDED": "generation_config.json"}
    assert not report.ok
    (signed / "config.json").unlink()
    assert added_by(signed, keys[1])["SIGNED_REMOVED"] == "error"
    (signed / "model.sig").write_text("{}")
    assert added_by(signed, keys[1]) == {"SIGNATURE_UNREADABLE": "error"}
    (signed / "model.sig").unlink()
    assert added_by(signed, keys[1]) == {"SIGNATURE_MISSING": "error"}


def test_a_repaired_copy_does_not_keep_the_signature(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    wrapped = {f"module.{name}": array for name, array in tensors().items()}
    root = make_model(tmp_path / "it", wrapped)
    sign(root, keys[0])
    repair(root, tmp_path / "new")
    assert not (tmp_path / "new" / "model.sig").exists()
