"""Map setting names of other trainers, and our former ones, to ours for error messages.

The names are those of Hugging Face Trainer, TRL, OpenRLHF, LLaMA-Factory, axolotl and verl. They
are not accepted; the error names our setting instead. `{}` stands for the user's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

_DTYPES = {
    "bf16": "model.dtype=bfloat16",
    "pure_bf16": "model.dtype=bfloat16",
    "fp16": "model.dtype=float16",
    "fp32": "model.dtype=float32",
    "dtype": "model.dtype={}",
    "torch_dtype": "model.dtype={}",
}

_TRAINING = {
    "learning_rate": "train.lr={}",
    "actor_learning_rate": "train.lr={}",
    "critic_learning_rate": "rl.critic_lr={}",
    "per_device_train_batch_size": "train.micro_batch_size={}",
    "per_device_batch_size": "train.micro_batch_size={}",
    "micro_train_batch_size": "train.micro_batch_size={}",
    "batch_size": "train.global_batch_size={}",
    "train_batch_size": "train.global_batch_size={}",
    "gradient_accumulation_steps": "train.global_batch_size=<train.micro_batch_size x ranks x {}>",
    "num_train_epochs": "train.epochs={}",
    "num_epochs": "train.epochs={}",
    "max_epochs": "train.epochs={}",
    "num_episodes": "train.epochs={}",
    "total_epochs": "train.epochs={}",
    "lr_scheduler": "train.scheduler={}",
    "lr_scheduler_type": "train.scheduler={}",
    "lr_warmup_ratio": "train.warmup_ratio={}",
    "warmup_steps": "train.warmup_ratio=<{} / steps>",
    "lr_warmup_steps": "train.warmup_ratio=<{} / steps>",
    "optim": "train.optimizer=<adamw or adamw_8bit>",
    "use_cpu": "train.device=cpu",
    "no_cuda": "train.device=cpu",
    "adam_beta1": "train.beta1={}",
    "adam_beta2": "train.beta2={}",
    "adam_epsilon": "train.eps={}",
    "l2": "train.weight_decay={}",
    "max_norm": "train.max_grad_norm={}",
    "gradient_clipping": "train.max_grad_norm={}",
    "max_seq_length": "train.max_len={}",
    "max_seq_len": "train.max_len={}",
    "max_length": "train.max_len={}",
    "cutoff_len": "train.max_len={}",
    "model_max_length": "train.max_len={}",
    "sequence_len": "train.max_len={}",
    "logging_steps": "train.log_every={}",
    "save_total_limit": "train.max_ckpt_num={}",
    "eval_strategy": "train.eval_steps=<steps>",
    "evaluation_strategy": "train.eval_steps=<steps>",
    "load_best_model_at_end": "train.keep=best",
    "metric_for_best_model": "train.best_metric={}",
    "early_stopping_patience": "train.early_stop_patience={}",
    "resume_from_checkpoint": "train.resume=auto",
    "overwrite_output_dir": "force=[train]",
    "use_gradient_checkpointing": "train.gradient_checkpointing=true",
    "mask_history": "train.mask=last_answer",
    "train_on_prompt": "train.mask=every_token",
    "num_processes": "train.nproc={}",
    "nproc_per_node": "train.nproc={}",
    "num_gpus": "train.nproc={}",
    "n_gpus_per_node": "train.nproc={}",
    "nnodes": "train.nodes={}",
    "num_nodes": "train.nodes={}",
    "num_machines": "train.nodes={}",
    "deepspeed": "zero=<zero0, zero1, zero2 or zero3>",
    "zero_stage": "zero=zero{}",
    "fsdp": "zero=zero3",
    "adam_offload": "zero.offload_optimizer=cpu",
    "cpu_offload": "zero.offload_optimizer=cpu",
}

_ADAPTER = {
    "use_peft": "peft=lora",
    "use_lora": "peft=lora",
    "finetuning_type": "peft=<lora, qlora or none>",
    "load_in_4bit": "peft=qlora",
    "load_in_8bit": "peft=qlora",
    "quantization_bit": "peft=qlora",
    "r": "peft.rank={}",
    "lora_r": "peft.rank={}",
    "lora_rank": "peft.rank={}",
    "lora_alpha": "peft.alpha={}",
    "lora_dropout": "peft.dropout={}",
    "lora_target": "peft.target_modules={}",
    "lora_target_modules": "peft.target_modules={}",
    "additional_target": "peft.modules_to_save=[{}]",
    "lora_modules_to_save": "peft.modules_to_save=[{}]",
    "bnb_4bit_quant_type": "peft.quant_type={}",
    "bnb_4bit_use_double_quant": "peft.double_quant={}",
    "double_quantization": "peft.double_quant={}",
}

_MODEL_AND_DATA = {
    "model_name_or_path": "model.path={}",
    "model_name": "model.path={}",
    "model_id": "model.path={}",
    "base_model": "model.path={}",
    "pretrain": "model.path={}",
    "model_revision": "model.revision={}",
    "flash_attn": "model.attn_implementation=flash_attention_2",
    "use_flash_attention_2": "model.attn_implementation=flash_attention_2",
    "eval_dataset": "data.eval_path={}",
    "validation_file": "data.eval_path={}",
    "val_size": "data.eval_fraction={}",
    "test_size": "data.eval_fraction={}",
    "dataset_split": "data.split={}",
    "input_key": "data.prompt_key={}",
    "output_key": "data.response_key={}",
    "dataset_text_field": "data.text_key={}",
    "output_dir": "paths.runs={}",
    "save_path": "paths.runs={}",
    "ckpt_path": "paths.runs={}",
    "logging_dir": "paths.runs={}",
    "run_name": "tag={}",
    "wandb_project": "tracking.experiment={}",
    "report_to": "tracking.uri=<URL of an MLflow server>",
}

_REWARDS = {
    "stage": "train={}",
    "advantage_estimator": "train={}",
    "loss_type": "train.loss.kind={}",
    "dpo_beta": "train.loss.beta={}",
    "pref_beta": "train.loss.beta={}",
    "simpo_gamma": "train.loss.gamma={}",
    "rpo_alpha": "train.loss.nll={}",
    "n_samples_per_prompt": "rl.num_generations={}",
    "mask_truncated_completions": "rl.mask_truncated={}",
    "num_ppo_epochs": "rl.ppo_epochs={}",
    "init_kl_coef": "rl.kl_coef={}",
    "lam": "rl.gae_lambda={}",
    "lambd": "rl.gae_lambda={}",
    "epsilon": "rl.clip_low={} rl.clip_high={}",
    "eps_clip": "rl.clip_low={} rl.clip_high={}",
    "cliprange": "rl.clip_low={} rl.clip_high={}",
    "cliprange_value": "rl.value_clip={}",
    "max_prompt_length": "rollout.max_prompt_len={}",
    "prompt_max_len": "rollout.max_prompt_len={}",
    "generate_max_len": "rollout.max_new_tokens={}",
    "max_completion_length": "rollout.max_new_tokens={}",
    "response_length": "rollout.max_new_tokens={}",
    "use_vllm": "rollout=vllm",
    "vllm_num_engines": "rollout=server rollout.servers={}",
    "vllm_server_base_url": "rollout=server rollout.urls=[{}]",
    "tensor_parallel_size": "rollout.tensor_parallel={}",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel={}",
    "gpu_memory_utilization": "rollout.gpu_memory={}",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory={}",
    "reward_pretrain": "reward=model reward.model={}",
    "reward_model_path": "reward=model reward.model={}",
    "remote_rm_url": "reward.url={}",
    "reward_funcs": "reward.function={}",
}

_FORMER = {
    "rl.prompts": "rl.rollout_batch_size={}",
    "rl.samples": "rl.num_generations={}",
    "rl.passes": "rl.ppo_epochs={}",
}

_DATASETS = ("dataset", "dataset_name", "dataset_path", "data_path", "train_file", "prompt_data")

_BASE = ("model_name_or_path", "base_model", "base_model_name_or_path", "base_model_path")
_SOURCE = ("adapter_path", "adapter_name_or_path", "adapter_model_path", "lora_path",
           "peft_model_path", "checkpoint", "checkpoint_dir", "model", "model_path", "input",
           "input_dir", "path", "load_dir", "local_dir")  # fmt: skip
_OUT = ("output_dir", "output_path", "output", "export_dir", "save_path", "target_dir")

PEERS: Mapping[str, Mapping[str, str]] = {
    "rlhf": {
        **_DTYPES,
        **_TRAINING,
        **_ADAPTER,
        **_MODEL_AND_DATA,
        **_REWARDS,
        **_FORMER,
        **dict.fromkeys(_DATASETS, "data.path={}"),
    },
    "deliver": {
        **{name: text.replace("model.dtype", "convert.dtype") for name, text in _DTYPES.items()},
        **dict.fromkeys(_BASE, "base={}"),
        **dict.fromkeys(("adapter", *_SOURCE), "source={}"),
        **dict.fromkeys((*_OUT, "out_dir"), "out={}"),
        "export_size": "convert.max_shard_size={}GB",
        "export_quantization_bit": "convert.quantize=w8a8",
        "force_download": "force=[convert]",
    },
    "audit": {
        **dict.fromkeys(_BASE, "base={}"),
        **dict.fromkeys(_SOURCE, "source={}"),
        **dict.fromkeys(("output", "output_path", "report", "json"), "out={}"),
        "output_dir": "out_dir={}",
        "repair": "fix=true out_dir=<a new folder>",
    },
    "verify": {
        **dict.fromkeys(_SOURCE, "source={}"),
        **dict.fromkeys(("base_url", "api_base", "endpoint", "host"), "url={}"),
        **dict.fromkeys(
            ("model", "served_model_name", "model_name", "lora_name", "adapter"), "name={}"
        ),
        **dict.fromkeys(("base_model", "base_model_name"), "base={}"),
        **dict.fromkeys(("output", "output_path", "report", "json", "junit"), "out={}"),
        **dict.fromkeys(("interval", "every"), "watch={}"),
        "timeout": "timeout_s={}",
        "gate": "profile={}",
    },
    "bisect": {
        **dict.fromkeys((*_BASE, "reference", "trained"), "a={}"),
        **dict.fromkeys((*_SOURCE, "served"), "b={}"),
        **dict.fromkeys(("a.adapter", "adapter_a"), "a_adapter={}"),
        **dict.fromkeys(("b.adapter", "adapter_b", "adapter"), "b_adapter={}"),
        **dict.fromkeys(("output", "output_path", "report", "json"), "out={}"),
    },
}
"""Other trainers' names -> our overrides, by program."""


def translate(program: str, name: str, value: str) -> str:
    """Return our overrides for another or a former name; an empty string for an unknown one.

    Args:
        program: a name in `flows`.
        name: name of the setting, without leading dashes; former names with their section.
        value: value that the user typed, or "<value>".
    """
    if program == "rlhf" and name in _DATASETS and value[:1] != "<":
        is_file = PurePath(value).suffix.lower() in _SUFFIXES
        return f"data.path={value}" if is_file else f"data.name={value}"
    if name == "stage" and value.isdigit():  # DeepSpeed's, not LLaMA-Factory's
        return f"zero=zero{value}" if program == "rlhf" else ""
    if name in ("lora_target", "lora_target_modules") and value == "all":
        value = "all-linear"
    return PEERS.get(program, {}).get(name, "").replace("{}", value)
