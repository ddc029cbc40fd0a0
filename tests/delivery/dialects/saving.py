"""Checkpoints as other tools leave them, saved by real peft, transformers, safetensors and torch.

What is a tool's own (which files, which of them under which name, what config.json says) follows
the file of its repository that a function names; where the tool installs, its test runs it instead.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.weights.adapters.making import quiet, save
from tests.weights.heads.making import head_tensors
from tests.weights.making import save_tokenizer

ADAPTER, INDEX = "adapter_model.safetensors", "model.safetensors.index.json"


def openrlhf_zero3(wrapped: Any, folder: Path) -> None:
    """OpenRLHF, `openrlhf/utils/deepspeed/deepspeed.py: save_model`, stage 3.

    peft's placeholders go, the gathered 16-bit tensors are pickled; config.json is the base's.
    """
    from peft import get_peft_model_state_dict

    save(wrapped, folder)
    gathered = {name: one.bfloat16() for name, one in wrapped.state_dict().items()}
    torch.save(get_peft_model_state_dict(wrapped, gathered), folder / "adapter_model.bin")
    (folder / ADAPTER).unlink()
    wrapped.config.to_json_file(folder / "config.json")
    save_tokenizer(folder)


def llamafactory(wrapped: Any, folder: Path) -> None:
    """LLaMA-Factory, `src/llamafactory/train/sft/workflow.py: run_sft`: Trainer's files."""
    save(wrapped, folder)
    save_tokenizer(folder)
    _trainer_files(folder)
    for name in ("all_results.json", "train_results.json"):
        (folder / name).write_text(json.dumps({"epoch": 3.0, "train_loss": 0.42}))
    (folder / "trainer_log.jsonl").write_text('{"current_steps": 10, "loss": 0.42}\n')
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    step = folder / "checkpoint-10"
    save(wrapped, step)
    torch.save({"state": {}, "param_groups": []}, step / "optimizer.pt")
    _trainer_files(step)


def axolotl(wrapped: Any, folder: Path) -> None:
    """axolotl, `src/axolotl/train.py: save_initial_configs`, `save_trained_model`.

    Tokenizer and the model's config.json are there before training, the adapter comes after it; the
    step's folder has DeepSpeed's file beside the adapter.
    """
    wrapped.peft_config["default"].save_pretrained(folder)
    save_tokenizer(folder)
    wrapped.config.save_pretrained(folder)
    save(wrapped, folder)
    (folder / "README.md").write_text("---\nlibrary_name: peft\ntags:\n- axolotl\n---\n")
    step = folder / "checkpoint-10"
    save(wrapped, step)
    wrapped.config.save_pretrained(step)
    _trainer_files(step)


def verl(wrapped: Any, folder: Path) -> None:
    """verl, `verl/workers/fsdp_workers.py: ActorRolloutRefWorker.save_checkpoint`.

    `lora_adapter/` of the actor: the settings as a plain dictionary, no tokenizer.
    """
    from peft import PeftType, TaskType, get_peft_model_state_dict

    folder.mkdir(parents=True)
    said = asdict(wrapped.peft_config["default"])
    said["task_type"] = TaskType(said["task_type"]).value
    said["peft_type"] = PeftType(said["peft_type"]).value
    said["target_modules"] = list(said["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(said, indent=4, ensure_ascii=False))
    held = get_peft_model_state_dict(wrapped)
    save_file({name: one.detach().cpu() for name, one in held.items()}, folder / ADAPTER)
    torch.save({}, folder.parent / "model_world_size_2_rank_0.pt")


def unsloth_merged(merged: dict[str, torch.Tensor], base: Path, folder: Path) -> None:
    """unsloth, `unsloth-zoo/unsloth_zoo/saving_utils.py: merge_and_overwrite_lora`, 16 bits.

    Tokenizer and config.json are saved, no generation_config.json; then the 16-bit base's shards
    are copied, with their index where there are several, and written over with what the deltas make
    of them. config.json has transformers 4's name for the dtype, marks, and no quantiser.
    """
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    said = json.loads((base / "config.json").read_text())
    said.pop("quantization_config", None)
    said["torch_dtype"] = said.pop("dtype")
    marks = {"unsloth_fixed": True, "unsloth_version": "2026.8.5", "use_cache": False}
    (folder / "config.json").write_text(json.dumps({**said, **marks}, indent=4))
    files = sorted(base.glob("*.safetensors"))
    for path in files:
        held = {name: merged[name].contiguous() for name in load_file(path)}
        save_file(held, folder / path.name, metadata={"format": "pt"})
    if len(files) > 1:
        shutil.copy2(base / INDEX, folder / INDEX)


def llamafactory_ppo(
    model: Any, folder: Path, *, shard: str = "5GB", pickled: bool = False
) -> None:
    """LLaMA-Factory, `src/llamafactory/train/callbacks.py: fix_valuehead_checkpoint`.

    The language model as transformers saves it, `value_head.*` beside it.
    """
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    _trainer_files(folder)
    head = head_tensors(hidden=model.config.hidden_size)
    if pickled:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        torch.save(head, folder / "value_head.bin")
    else:
        save_file(head, folder / "value_head.safetensors", metadata={"format": "pt"})


def _trainer_files(folder: Path) -> None:
    """What transformers' Trainer leaves in a folder; `training_args.bin` is a pickled object."""
    from transformers import TrainingArguments

    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10, "epoch": 3.0}))
    settings = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    torch.save(settings, folder / "training_args.bin")
