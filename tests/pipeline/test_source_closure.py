"""A cache key covers the files that a stage really runs, whatever their type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.chain import stages as chain_stages
from flows.delivery import stages as deliver_steps
from tasks.core.errors import PlumblineError
from tasks.pipeline.source_closure import PROJECT, closure, source_digest
from tasks.pipeline.stage import Stage

STAGES = {
    stage.code: stage
    for module in (chain_stages, deliver_steps)
    for stage in vars(module).values()
    if isinstance(stage, Stage)
}
SOURCES = {
    "tasks/__init__.py": "",
    "tasks/merge.py": "def merge():\n    from tasks.weights.fold import fold\n    return fold\n",
    "tasks/weights/__init__.py": "",
    "tasks/weights/fold.py": "import json\nif TYPE_CHECKING:\n    import tasks.unused\n",
    "tasks/weights/fold.c": "int x;",
    "tasks/weights/table.json": "{}",
    "tasks/weights/fold.pyc": "x",
    "tasks/train.py": 'COMMAND = ["python", "-m", "tasks.ranks"]\n',
    "tasks/ranks/__init__.py": "",
    "tasks/ranks/__main__.py": "import tasks.losses\n",
    "tasks/losses/__init__.py": 'def load(name):\n    return import_module(f"{__name__}.{name}")\n',
    "tasks/losses/dpo.py": "",
    "tasks/unused.py": "",
}
MERGE = {
    "tasks/__init__.py", "tasks/merge.py", "tasks/weights/__init__.py", "tasks/weights/fold.py",
    "tasks/weights/fold.c", "tasks/weights/table.json",
}  # fmt: skip
TRAIN = {
    "tasks/__init__.py", "tasks/train.py", "tasks/ranks/__init__.py", "tasks/ranks/__main__.py",
    "tasks/losses/__init__.py", "tasks/losses/dpo.py",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def files_of(project: Path, module: str, **options: Any) -> set[str]:
    return {path.as_posix() for path in closure([module], project=project, **options)}


def test_the_closure_follows_imports_child_processes_and_files_of_other_kinds(
    project: Path,
) -> None:
    assert files_of(project, "tasks.merge") == MERGE
    assert files_of(project, "tasks.train") == TRAIN
    own = {file for file in TRAIN if "losses" not in file}
    assert files_of(project, "tasks.train", without=["tasks.losses"]) == own
    for line in ("from .fold import fold", "from . import fold", "from ..weights import fold"):
        (project / "tasks/weights/other.py").write_text(line)
        relative = (MERGE - {"tasks/merge.py"}) | {"tasks/weights/other.py"}
        assert files_of(project, "tasks.weights.other") == relative


def test_a_byte_of_any_file_in_the_closure_changes_the_digest(project: Path) -> None:
    before = source_digest(["tasks.merge"], project=project)
    for name in SOURCES:
        path = project / name
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert (source_digest(["tasks.merge"], project=project) != before) == (name in MERGE), name
        path.write_bytes(text)
    assert source_digest(["tasks.merge"], project=project) == before
    (project / "tasks/weights/fold.h").write_text("")  # a new file beside a module
    assert source_digest(["tasks.merge"], project=project) != before
    with pytest.raises(PlumblineError, match=r"tasks\.mrege"):
        closure(["tasks.mrege"], project=project)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(
            stage,
            id="+".join(code),
            marks=() if stage in (chain_stages.MERGE, chain_stages.TRAIN) else pytest.mark.slow,
        )
        for code, stage in STAGES.items()
    ],
)
def test_what_importing_a_stage_loads_is_in_its_closure(stage: Stage) -> None:
    """Python itself tells what runs: every module of ours that it loads has to be covered."""
    program = (
        f"import sys, {', '.join(stage.code)}\n"
        "print(*(name for name, module in sys.modules.items() if getattr(module, '__file__', 0)))"
    )  # a folder without `__init__.py` is a module without file
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout
    covered = {path.as_posix() for path in closure(stage.code, without=stage.without)}
    ours = [module for module in printed.split() if module.partition(".")[0] in ("flows", "tasks")]
    files = [module.replace(".", "/") for module in ours]
    assert len(ours) > len(stage.code)
    assert [f for f in files if not {f"{f}.py", f"{f}/__init__.py"} & covered] == []


def test_what_changes_results_and_was_in_no_key_is_covered() -> None:
    merge = {path.as_posix() for path in closure(chain_stages.MERGE.code)}
    train = {path.as_posix() for path in closure(chain_stages.TRAIN.code, without=["tasks.rl"])}
    online = {path.as_posix() for path in closure(chain_stages.REINFORCE.code)}
    assert {"tasks/weights/native/fold.c", "tasks/weights/quantized/nf4.py"} <= merge
    assert {"tasks/weights/quantized/nf4.py", "tasks/training/losses.py"} <= train
    assert not [path for path in train if path.startswith("tasks/rl/")]
    assert {"tasks/rl/algorithms.py", "tasks/serving/vllm/rollouts.py"} <= online
