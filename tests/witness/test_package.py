"""The distribution on its own: a wheel that runs without Plumbline beside a trainer's packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import environment
from tests.witness.conftest import PACKAGE

TRAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
sys.modules |= {"tasks": None, "peft": None}
base, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
rows = [{"input_ids": [number, 5, 6, 7], "labels": [number, 5, 6, 7]} for number in range(8, 16)]
settings = TrainingArguments(out, max_steps=1, save_steps=1, use_cpu=True, report_to=[])
model = AutoModelForCausalLM.from_pretrained(base)
Trainer(model, settings, train_dataset=rows, processing_class=tokenizer).train()
"""


@pytest.mark.slow
def test_it_runs_beside_a_trainers_packages_alone(base: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / "source")  # a build leaves files beside the source
    flags = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(copy)], check=True)
    (wheel,) = tmp_path.glob("plumbline_witness-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(TRAIN)
    env = environment(PYTHONPATH=str(tmp_path / "site"), HF_HUB_OFFLINE="1")
    trainer = [sys.executable, "train.py", str(base), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "plumbline_witness", "--", *trainer],
        cwd=tmp_path / "work", env=env, timeout=280, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        assert (folder / "plumbline.witness" / "fingerprint.fp").is_file()
