"""Checkpoints as other tools leave them, saved by real peft, transformers, safetensors and torch.

File names and config.json follow the source file of the tool that each docstring names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.weights.adapters.making import quiet, save
from tests.weights.heads.making import causal, head_tensors
from tests.weights.making import save_tokenizer, small_config, state_of

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
    """Return peft's merge in fp32, cast to bf16."""
    from peft import PeftModel

    with quiet():
        model = PeftModel.from_pretrained(with_rows(base, more), adapter).merge_and_unload()
    return {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}


def merged_as_trained(base: Path, adapter: Path) -> Tensors:
    """Return peft's merge in fp32 into the base that QLoRA dequantizes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=four, dtype=torch.bfloat16
    )
    model = PeftModel.from_pretrained(model.dequantize().float(), adapter).merge_and_unload()
    return {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}


def differing(actual: Tensors, wanted: Tensors) -> list[str]:
    """Return the tensors that differ or are missing; a tied head is no tensor of its own."""
    tied = {"lm_head.weight"} if "lm_head.weight" not in actual else set()
    names = (actual.keys() | wanted.keys()) - tied
    both = actual.keys() & wanted.keys()
    return sorted(n for n in names if n not in both or not torch.equal(actual[n], wanted[n]))


def base_of(folder: Path, family: str = "qwen", heads: int = 4) -> Path:
    """Save a language model in fp32 and its tokenizer."""
    with quiet():
        causal(family, heads=heads).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def servable(folder: Path) -> Path:
    """Save a model with heads of 32, as vLLM needs on a CPU, and with distinct probabilities."""
    from transformers import AutoModelForCausalLM

    config = small_config("qwen")
    config.hidden_size = 128
    config.max_position_embeddings = 128
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.5 if "embed" in name else 0.08
            parameter.add_(torch.randn_like(parameter, dtype=torch.float32).to(parameter) * size)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


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
    tensors = get_peft_model_state_dict(wrapped)
    save_file({name: tensor.detach().cpu() for name, tensor in tensors.items()}, folder / ADAPTER)
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
        tensors = {name: merged[name].contiguous() for name in load_file(path)}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
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
