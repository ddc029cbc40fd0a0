"""Checkpoints as other tools leave them, saved by real peft, transformers, safetensors and torch.

File names and config.json follow the source file of the tool that each docstring names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import save_model, save_tokenizer
from tests.weights import making as families
from tests.weights.heads import config_of
from tests.weights.making import quiet, save, small_config, state_of

Tensors = dict[str, torch.Tensor]
TARGETS = ["q_proj", "v_proj", "down_proj"]
ADAPTER, INDEX = "adapter_model.safetensors", "model.safetensors.index.json"


def with_rows(base: Path, more: int = 0) -> Any:
    """Load a language model in fp32, with more rows in its embeddings."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if more:
            model.resize_token_embeddings(model.config.vocab_size + more, mean_resizing=False)
    return model


def merged_by_peft(base: Path, adapter: Path, more: int = 0) -> Tensors:
    """Return peft's merge in fp32 into a base with so many more rows, cast to bf16."""
    return dict(families.merged_by_peft(with_rows(base, more), adapter).state_dict())


def merged_as_trained(base: Path, adapter: Path) -> Tensors:
    """Return peft's merge in fp32 into the base that QLoRA dequantizes, cast to bf16."""
    return dict(families.merged_as_trained(base, adapter).state_dict())


def differing(actual: Tensors, wanted: Tensors) -> list[str]:
    """Return the tensors that differ or are missing; a tied head is no tensor of its own."""
    tied = {"lm_head.weight"} if "lm_head.weight" not in actual else set()
    names = (actual.keys() | wanted.keys()) - tied
    both = actual.keys() & wanted.keys()
    return sorted(n for n in names if n not in both or not torch.equal(actual[n], wanted[n]))


def base_of(folder: Path, family: str = "qwen", heads: int = 4) -> Path:
    """Save a language model in fp32 and its tokenizer."""
    return save_model(folder, config_of(family, heads), dtype="float32")


def servable(folder: Path) -> Path:
    """Save a model with heads of 32, as vLLM needs on a CPU, and with distinct probabilities."""
    config = small_config("qwen")
    config.hidden_size = config.max_position_embeddings = 128
    return save_model(folder, config, seed=1)


def rename(source: Path, folder: Path, new_name: Callable[[str], str], stem: str = "model") -> Path:
    """Copy a folder of one safetensors file with other names of its tensors."""
    shutil.copytree(source, folder)
    tensors = {new_name(name): tensor for name, tensor in state_of(source, stem).items()}
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    return folder


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


def unsloth_merged(merged: dict[str, torch.Tensor], base: Path, folder: Path) -> None:
    """unsloth, `unsloth-zoo/unsloth_zoo/saving_utils.py: merge_and_overwrite_lora`, 16 bits.

    The base's shards are overwritten with merged tensors; there is no generation_config.json.
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
        tensors = {name: merged[name].contiguous() for name in load_file(path)}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    if len(files) > 1:
        shutil.copy2(base / INDEX, folder / INDEX)


def _trainer_files(folder: Path) -> None:
    """Write the files of transformers' Trainer; `training_args.bin` is a pickled object."""
    from transformers import TrainingArguments

    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10, "epoch": 3.0}))
    settings = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    torch.save(settings, folder / "training_args.bin")


def write_zero(root: Path, tensors: dict[str, torch.Tensor], world: int) -> None:
    """Write a ZeRO-3 checkpoint by torch alone: ranks have equal, padded shares of each tensor."""
    (root / "global_step1").mkdir(parents=True)
    state: dict[str, Any] = {
        "module": {name: torch.empty(0) for name in tensors},
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in tensors.items()}],
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": world,
    }
    shares: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for tensor in tensors.values():
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % world))
        for share, own in zip(shares, padded.chunk(world), strict=True):
            share.append(own)
    for rank, share in enumerate(shares):
        name = root / "global_step1" / f"zero_pp_rank_{rank}_mp_rank_00"
        optim = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": [torch.cat(share)]}
        torch.save({"optimizer_state_dict": optim}, f"{name}_optim_states.pt")
        torch.save(state, f"{name}_model_states.pt")
