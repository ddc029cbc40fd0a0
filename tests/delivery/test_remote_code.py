"""A checkpoint with code of its own (`auto_map`): it never runs, and nobody is asked to run it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.audit.making import edit_json
from tests.commands import command, environment
from tests.weights.making import make_base

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, LlamaForCausalLM
class OwnConfig(PreTrainedConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnModel(LlamaForCausalLM):
    pass
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remote") / "base"
    make_base(root, "llama")
    (root / "manifest.json").unlink()
    return root


def with_code(base: Path, source: Path, **values: str) -> Path:
    """Add Python files and `auto_map` to a model; return the file that its code would make."""
    shutil.copytree(base, source)
    marker = source.parent / "ran"
    (source / "own.py").write_text(CODE.format(marker=str(marker)))
    model = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(source / "config.json", auto_map=model, **values)
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnToken"]})
    return marker


def run(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run deliver with a user who answers every question with yes."""
    where = [f"out={source.parent / 'out'}", f"paths.runs={source.parent / 'runs'}"]
    return subprocess.run(
        command("deliver", f"source={source}", *where, *arguments), cwd=source, env=environment(),
        input="y\ny\ny\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=280, check=False,
    )  # fmt: skip


def test_a_model_that_is_its_own_code_is_refused(base: Path, tmp_path: Path) -> None:
    marker = with_code(base, tmp_path / "source", model_type="own")
    done = run(tmp_path / "source", "plan=true")
    assert done.returncode == 2
    assert "names code of the model's own (auto_map), which is not run" in done.stdout
    assert "y/N" not in done.stdout
    assert not marker.exists()


def test_a_known_class_is_delivered_without_the_code(base: Path, tmp_path: Path) -> None:
    marker = with_code(base, tmp_path / "source")
    done = run(tmp_path / "source", "smoke.engine=none")
    assert done.returncode == 0, done.stdout
    assert not marker.exists()
    assert not list((tmp_path / "out").glob("*.py"))
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text())
