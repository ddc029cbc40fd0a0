"""Checkpoints as other tools leave them, saved by real peft, transformers, safetensors and torch.

File names and config.json follow the source file of the tool that each docstring names. A tool that
can be installed is run by its own test instead.
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

    peft's placeholders are removed, the gathered 16-bit tensors are pickled. config.json is that of
    the base.
    """
    from peft import get_peft_model_state_dict

    save(wrapped, folder)
    gathered = {name: tensor.bfloat16() for name, tensor in wrapped.state_dict().items()}
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

    Tokenizer and config.json are written before training, the adapter after it. The folder of a
    step has DeepSpeed's file beside the adapter.
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
    config = asdict(wrapped.peft_config["default"])
    config["task_type"] = TaskType(config["task_type"]).value
    config["peft_type"] = PeftType(config["peft_type"]).value
    config["target_modules"] = list(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4, ensure_ascii=False))
    held = get_peft_model_state_dict(wrapped)
    save_file({name: tensor.detach().cpu() for name, tensor in held.items()}, folder / ADAPTER)
    torch.save({}, folder.parent / "model_world_size_2_rank_0.pt")


def unsloth_merged(merged: dict[str, torch.Tensor], base: Path, folder: Path) -> None:
    """unsloth, `unsloth-zoo/unsloth_zoo/saving_utils.py: merge_and_overwrite_lora`, 16 bits.

    Tokenizer and config.json are saved, but no generation_config.json. The 16-bit shards of the
    base are copied, with their index if there are several, and overwritten with the merged tensors.
    config.json has `torch_dtype`, marks of unsloth, and no quantization.
    """
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    config = json.loads((base / "config.json").read_text())
    config.pop("quantization_config", None)
    config["torch_dtype"] = config.pop("dtype")
    marks = {"unsloth_fixed": True, "unsloth_version": "2026.8.5", "use_cache": False}
    (folder / "config.json").write_text(json.dumps({**config, **marks}, indent=4))
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
    """Write the files of transformers' Trainer; `training_args.bin` is a pickled object."""
    from transformers import TrainingArguments

    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10, "epoch": 3.0}))
    settings = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    torch.save(settings, folder / "training_args.bin")
