"""The distribution on its own: built as a wheel, installed beside nothing but a trainer's packages.

The environment has the closure of the wheel's requirements and accelerate, which the Trainer needs;
neither Plumbline nor its other packages are importable.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.witness.conftest import PACKAGE

TRAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
base, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
rows = [{"input_ids": [number, 5, 6, 7], "labels": [number, 5, 6, 7]} for number in range(8, 16)]
settings = TrainingArguments(out, max_steps=1, save_steps=1, use_cpu=True, report_to=[])
model = AutoModelForCausalLM.from_pretrained(base)
Trainer(model, settings, train_dataset=rows, processing_class=tokenizer).train()
"""
ABSENT = (
    "import importlib.util as u; print([n for n in ('peft', 'tasks', 'vllm') if u.find_spec(n)])"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy = shutil.copytree(PACKAGE, folder / "source")  # a build leaves files beside the source
    flags = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(copy)], check=True)
    (built,) = folder.glob("plumbline_witness-*.whl")
    return built


def closure(names: list[str]) -> list[Distribution]:
    """Return distributions with everything that they require here, extras left out."""
    known: dict[str, Distribution] = {}
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in known:
            continue
        known[name] = distribution(name)
        wanted = [Requirement(line) for line in known[name].requires or []]
        queue += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return list(known.values())


def link(dist: Distribution, site: Path) -> None:
    """Link a distribution's packages, modules and metadata into `site-packages`."""
    roots = {path.parts[0] for path in dist.files or [] if path.parts[0] not in ("..", "bin")}
    for root in roots - {"__pycache__"}:
        target = site / root
        if not target.exists():
            target.symlink_to(str(dist.locate_file(root)))


@pytest.mark.slow
def test_it_runs_beside_a_trainers_packages_alone(wheel: Path, base: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    (site,) = (tmp_path / "bare" / "lib").glob("python3*/site-packages")
    for dist in closure(["torch", "transformers", "numpy", "safetensors", "accelerate"]):
        link(dist, site)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    (tmp_path / "work").mkdir()
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(python), *words], cwd=tmp_path / "work", env=env, timeout=280,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    assert run("-c", ABSENT).strip() == "[]"
    (tmp_path / "work" / "train.py").write_text(TRAIN)
    out = tmp_path / "out"
    trainer = (str(python), "train.py", str(base), str(out))
    run("-m", "plumbline_witness", "--", *trainer)
    for folder in (out, out / "checkpoint-1"):
        assert (folder / "plumbline.witness" / "fingerprint.fp").is_file()
