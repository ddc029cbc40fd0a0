"""Setting names of other trainers, for error messages: an error names our setting instead.

The names are those that users of Hugging Face Trainer, TRL, OpenRLHF, LLaMA-Factory, axolotl and
verl paste most. `{}` stands for the user's value.
"""

from __future__ import annotations

from collections.abc import Mapping

_FILES = (".jsonl", ".json", ".csv", ".parquet", ">")

_RLHF = {
    "model.path={}": "model_name_or_path model_name model_id base_model pretrain",
    "model.revision={}": "model_revision",
    "model.dtype={}": "dtype torch_dtype",
    "model.dtype=bfloat16": "bf16 pure_bf16",
    "model.dtype=float16": "fp16",
    "model.attn_implementation=flash_attention_2": "flash_attn use_flash_attention_2",
    "data.path={}": "dataset dataset_name dataset_path data_path train_file prompt_data",
    "data.eval_path={}": "eval_dataset validation_file",
    "data.eval_fraction={}": "val_size test_size",
    "data.split={}": "dataset_split",
    "data.prompt_key={}": "input_key",
    "data.response_key={}": "output_key",
    "data.text_key={}": "dataset_text_field",
    "paths.runs={}": "output_dir save_path ckpt_path logging_dir",
    "tag={}": "run_name",
    "tracking.experiment={}": "wandb_project",
    "tracking.uri=<URL of an MLflow server>": "report_to",
    "train=<objective or algorithm>": "stage advantage_estimator",
    "train.lr={}": "learning_rate actor_learning_rate",
    "train.micro_batch_size={}": "per_device_train_batch_size micro_train_batch_size",
    "train.global_batch_size={}": "batch_size train_batch_size",
    "train.global_batch_size=<micro_batch_size x ranks x {}>": "gradient_accumulation_steps",
    "train.epochs={}": "num_train_epochs num_epochs max_epochs num_episodes total_epochs",
    "train.scheduler={}": "lr_scheduler lr_scheduler_type",
    "train.warmup_ratio={}": "lr_warmup_ratio",
    "train.warmup_ratio=<{} / steps>": "warmup_steps lr_warmup_steps",
    "train.optimizer=<adamw or adamw_8bit>": "optim",
    "train.device=cpu": "use_cpu no_cuda",
    "train.beta1={}": "adam_beta1",
    "train.beta2={}": "adam_beta2",
    "train.eps={}": "adam_epsilon",
    "train.max_grad_norm={}": "gradient_clipping max_norm",
    "train.max_len={}": "max_seq_length max_seq_len max_length cutoff_len sequence_len",
    "train.log_every={}": "logging_steps",
    "train.eval_steps=<steps>": "eval_strategy evaluation_strategy",
    "train.max_ckpt_num={}": "save_total_limit",
    "train.keep=best": "load_best_model_at_end",
    "train.best_metric={}": "metric_for_best_model",
    "train.early_stop_patience={}": "early_stopping_patience",
    "train.resume=auto": "resume_from_checkpoint",
    "train.gradient_checkpointing=true": "use_gradient_checkpointing",
    "train.nproc={}": "num_processes nproc_per_node num_gpus n_gpus_per_node",
    "train.nodes={}": "nnodes num_nodes num_machines",
    "force=[train]": "overwrite_output_dir",
    "zero=<zero0, zero1, zero2 or zero3>": "deepspeed zero_stage",
    "zero=zero3": "fsdp",
    "zero.offload_optimizer=cpu": "adam_offload cpu_offload",
    "peft=lora": "use_peft use_lora",
    "peft=<lora, qlora or none>": "finetuning_type",
    "peft=qlora": "load_in_4bit load_in_8bit quantization_bit",
    "peft.rank={}": "r lora_r lora_rank",
    "peft.alpha={}": "lora_alpha",
    "peft.dropout={}": "lora_dropout",
    "peft.target_modules={}": "lora_target lora_target_modules",
    "peft.modules_to_save=[{}]": "additional_target lora_modules_to_save",
    "peft.quant_type={}": "bnb_4bit_quant_type",
    "train.loss.kind={}": "loss_type",
    "train.loss.beta={}": "dpo_beta pref_beta",
    "train.loss.gamma={}": "simpo_gamma",
    "train.loss.nll={}": "rpo_alpha",
    "rl.num_generations={}": "n_samples_per_prompt",
    "rl.mask_truncated={}": "mask_truncated_completions",
    "rl.ppo_epochs={}": "num_ppo_epochs",
    "rl.kl_coef={}": "init_kl_coef",
    "rl.gae_lambda={}": "lam lambd",
    "rl.clip_low={} rl.clip_high={}": "epsilon eps_clip cliprange",
    "rl.value_clip={}": "cliprange_value",
    "rl.critic_lr={}": "critic_learning_rate",
    "rollout.max_prompt_len={}": "max_prompt_length prompt_max_len",
    "rollout.max_new_tokens={}": "generate_max_len max_completion_length response_length",
    "rollout=vllm": "use_vllm",
    "rollout=server rollout.servers={}": "vllm_num_engines",
    "rollout=server rollout.urls=[{}]": "vllm_server_base_url",
    "rollout.tensor_parallel={}": "tensor_parallel_size vllm_tensor_parallel_size",
    "rollout.gpu_memory={}": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "reward=model reward.model={}": "reward_pretrain reward_model_path",
    "reward.url={}": "remote_rm_url",
    "reward.function={}": "reward_funcs",
}
_DELIVER = {
    "base={}": "model_name_or_path base_model base_model_name_or_path",
    "source={}": "adapter_path adapter_name_or_path lora_path checkpoint_dir model_path",
    "out={}": "output_dir output_path export_dir save_path out_dir",
    "convert.max_shard_size={}GB": "export_size",
    "convert.dtype={}": "dtype torch_dtype",
}
PEERS: Mapping[str, Mapping[str, str]] = {
    program: {name: ours for ours, names in table.items() for name in names.split()}
    for program, table in (("rlhf", _RLHF), ("deliver", _DELIVER))
}
"""Other trainers' names -> our overrides, by program."""


def translate(program: str, name: str, value: str) -> str:
    """Return our overrides for another trainer's name; an empty string for an unknown one."""
    ours = PEERS.get(program, {}).get(name, "")
    if ours == "data.path={}" and not value.endswith(_FILES):
        ours = "data.name={}"
    if name.startswith("lora_target") and value == "all":
        value = "all-linear"
    return ours.replace("{}", value)
