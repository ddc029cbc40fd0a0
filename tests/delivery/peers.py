"""Trainers of other projects, each in an environment of its own below $PLUMBLINE_PEERS (peers.sh).

LLaMA-Factory and ms-swift run by their command lines; save_peers.py does what needs code.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import save_model
from tests.weights.making import small_config

SAVER = Path(__file__).with_name("save_peers.py")
WITNESS = Path(__file__).parents[2] / "tasks" / "witness"


def peer_folder(peer: str) -> Path:
    """Return the folder of another project; skip the test where there is none."""
    root = os.environ.get("PLUMBLINE_PEERS")
    if not root:
        pytest.skip("PLUMBLINE_PEERS is not set; tests/delivery/peers.sh makes the environments")
    return Path(root).expanduser() / peer


def run_peer(peer: str, *arguments: str, cwd: Path, witnessed: bool = False) -> None:
    """Run `python ARGUMENTS` in the environment of a trainer, offline and on the CPU.

    `cwd` takes what trainers leave beside their output; `witnessed` runs it under the witness.
    """
    python = peer_folder(peer) / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is not there; tests/delivery/peers.sh {peer} makes it")
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    before: list[str] = []
    if witnessed:
        before, offline["PYTHONPATH"] = [str(python), "-m", "plumbline_witness", "--"], str(WITNESS)
    cwd.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*before, str(python), *arguments], cwd=cwd, env=inherited | offline, timeout=900,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


def make_place(root: Path, base: Path | None = None) -> Path:
    """Write `base` and data sets in the trainers' formats.

    Without a base to copy it is a tied Qwen2 with heads of 16, which vLLM does not serve on a CPU.
    """
    if base is None:
        _save_small(root / "base")
    else:
        shutil.copytree(base, root / "base")
        _as_published(root / "base")
        _as_transformers_4_reads_it(root / "base")
    turns = [(f"say {i}", f"{i} and {i + 1}") for i in range(8)]
    alpaca = [{"instruction": ask, "input": "", "output": answer} for ask, answer in turns]
    pairs = [
        {"instruction": ask, "input": "", "chosen": yes, "rejected": "no"} for ask, yes in turns
    ]
    columns = {
        "prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected",
    }  # fmt: skip
    chats = [
        {
            "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}],
            "rejected_response": "no",
        }
        for a, b in turns
    ]
    listed = {
        "alpaca": {"file_name": "alpaca.json"},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
    }
    files = {"alpaca": alpaca, "pairs": pairs, "dataset_info": listed}
    for name, content in files.items():
        (root / f"{name}.json").write_text(json.dumps(content))
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return root


def train_llamafactory(place: Path, name: str, *, witnessed: bool = False, **changes: Any) -> Path:
    """Run `llamafactory-cli train` for two steps of LoRA; returns its output folder."""
    out = place / f"llamafactory-{name}"
    settings = {
        "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4,
        "lora_alpha": 8, "lora_target": "q_proj,v_proj",
        "model_name_or_path": str(place / "base"), "dataset_dir": str(place), "dataset": "alpaca",
        "template": "chatml", "cutoff_len": 64, "output_dir": str(out), "max_steps": 2,
        "per_device_train_batch_size": 2, "learning_rate": 0.01, "report_to": "none",
        "save_steps": 2, "logging_steps": 1, "use_cpu": True, "bf16": True,
    }  # fmt: skip
    work = place / f"work-{out.name}"
    work.mkdir()
    (work / "run.json").write_text(json.dumps(settings | changes))
    (work / "run.yaml").write_text((work / "run.json").read_text())  # JSON is YAML
    words = ("-m", "llamafactory.cli", "train", "run.yaml")
    run_peer("llamafactory", *words, cwd=work, witnessed=witnessed)
    return out


def train_swift(
    place: Path, name: str, command: str, *changes: str, witnessed: bool = False
) -> Path:
    """Run `swift COMMAND` for two steps of LoRA; returns the checkpoint's folder."""
    out = place / f"swift-{name}"
    run_peer(
        "swift", "-m", f"swift.cli.{command}", "--model", str(place / "base"),
        "--model_type", "qwen2", "--template", "chatml", "--tuner_type", "lora",
        "--lora_rank", "4", "--lora_alpha", "8", "--dataset", str(place / "chats.jsonl"),
        "--output_dir", str(out), "--add_version", "false", "--max_steps", "2",
        "--learning_rate", "0.01", "--use_hf", "true", "--torch_dtype", "bfloat16",
        "--report_to", "tensorboard", "--dataloader_num_workers", "0",
        "--split_dataset_ratio", "0", "--use_cpu", "true", *changes,
        cwd=place / f"work-{out.name}", witnessed=witnessed,
    )  # fmt: skip
    return out / "checkpoint-2"


def _save_small(folder: Path) -> None:
    config = small_config("qwen")
    config.max_position_embeddings = 256
    save_model(folder, config)


def _as_published(folder: Path) -> None:
    """Store a model in bf16, as most are: NF4 of weights that were cast first is another one."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("dtype", None)
    path.write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))


def _as_transformers_4_reads_it(folder: Path) -> None:
    """Write a tokenizer as version 4 of transformers and tokenizers 0.19 did."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
    path.write_text(json.dumps(config))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    path.write_text(json.dumps(tokenizer))
