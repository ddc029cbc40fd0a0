"""Values of settings: ranges of numbers, batch sizes, ZeRO options, the schedule, stage names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.learning import Optim
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.training.resume import newest
from tasks.training.selection import direction

_MANY = 1e12
_TINY = 1e-30
LIMITS: tuple[tuple[str, float, float, float], ...] = (
    # key, least, most, what to offer
    ("model.steps", 0, _MANY, 300),
    ("data.eval_fraction", 1e-6, 0.9, 0.05),
    ("data.max_samples", 1, _MANY, 1000),
    ("data.max_truncated", 0, 1, 0.2),
    ("data.train_size", 1, _MANY, 4000),
    ("data.heldout_size", 1, _MANY, 300),
    ("train.nproc", 1, _MANY, 1),
    ("train.nodes", 1, _MANY, 1),
    ("train.threads", 1, _MANY, 1),
    ("train.sequence_parallel", 1, _MANY, 1),
    ("train.epochs", _TINY, _MANY, 1),
    ("train.max_steps", 1, _MANY, 100),
    ("train.router_aux_loss_coef", 0, _MANY, 0.001),
    ("train.lr", _TINY, 10, 2e-4),
    ("train.warmup_ratio", 0, 1, 0.03),
    ("train.weight_decay", 0, _MANY, 0),
    ("train.beta1", 0, 0.999999, 0.9),
    ("train.beta2", 0, 0.999999, 0.999),
    ("train.eps", _TINY, 1, 1e-8),
    ("train.max_grad_norm", 0, _MANY, 1),
    ("train.max_len", 2, _MANY, 256),
    ("train.log_every", 1, _MANY, 1),
    ("train.min_lr_ratio", 0, 1, 0.1),
    ("train.decay_ratio", _TINY, 1, 0.1),
    ("train.power", _TINY, 100, 1),
    ("train.num_cycles", 1, 10_000, 3),
    ("train.eval_steps", 0, _MANY, 100),
    ("train.early_stop_patience", 0, _MANY, 3),
    ("train.save_steps", 0, _MANY, 50),
    ("train.max_ckpt_num", 0, _MANY, 3),
    ("train.max_ckpt_gb", _TINY, _MANY, 100),
    ("train.collective_timeout_s", 1, _MANY, 1800),
    ("train.timeout_s", _TINY, _MANY, 3600),
    ("train.probes", 1, _MANY, 32),
    ("peft.rank", 1, _MANY, 16),
    ("peft.alpha", _TINY, _MANY, 16),
    ("peft.dropout", 0, 0.99, 0),
    ("zero.stage", 0, 3, 2),
    ("zero.bucket_size", 1, _MANY, 50_000_000),
    ("zero.persistence_threshold", 0, _MANY, 100_000),
    ("rl.rollout_batch_size", 1, _MANY, 32),
    ("rl.num_generations", 1, _MANY, 4),
    ("rl.iterations", 1, _MANY, 100),
    ("rl.staleness", 0, 1, 0),
    ("rl.ppo_epochs", 1, _MANY, 1),
    ("rl.eval_prompts", 1, _MANY, 128),
    ("rl.environment_timeout_s", _TINY, _MANY, 60),
    ("rl.max_turns", 1, _MANY, 8),
    ("rl.gamma", 0, 1, 1),
    ("rl.gae_lambda", 0, 1, 0.95),
    ("rl.clip_low", _TINY, 1, 0.2),
    ("rl.clip_high", _TINY, _MANY, 0.2),
    ("rl.dual_clip", 1, _MANY, 3),
    ("rl.kl_coef", 0, _MANY, 0.02),
    ("rl.kl_target", _TINY, _MANY, 0.1),
    ("rl.kl_horizon", 1, _MANY, 10_000),
    ("rl.kl_limit", _TINY, _MANY, 1),
    ("rl.entropy_coef", 0, _MANY, 0),
    ("rl.critic_lr", _TINY, 10, 1e-4),
    ("rl.critic_warmup", 0, _MANY, 2),
    ("rl.value_clip", _TINY, _MANY, 0.2),
    ("rl.refill", 0, _MANY, 2),
    ("rl.overlong_buffer", 0, _MANY, 16),
    ("rl.overlong_penalty", 0, _MANY, 1),
    ("rl.correction_high", 1, _MANY, 2),
    ("rl.correction_low", 0, 1, 0.5),
    ("rl.mismatch_limit", _TINY, _MANY, 0.1),
    ("rl.mismatch_factor", 0, _MANY, 4),
    ("rollout.max_new_tokens", 1, _MANY, 64),
    ("rollout.max_prompt_len", 1, _MANY, 256),
    ("rollout.temperature", _TINY, 100, 1),
    ("rollout.top_p", _TINY, 1, 1),
    ("rollout.top_k", 0, _MANY, 0),
    ("rollout.servers", 0, 1024, 2),
    ("rollout.threads", 1, _MANY, 1),
    ("rollout.tensor_parallel", 1, _MANY, 1),
    ("rollout.kv_cache_gib", 0.01, _MANY, 1),
    ("rollout.gpu_memory", 0.01, 1, 0.5),
    ("rollout.max_num_seqs", 1, _MANY, 256),
    ("rollout.timeout_s", _TINY, _MANY, 900),
    ("reward.timeout_s", _TINY, _MANY, 60),
    ("reward.retries", 0, _MANY, 2),
    ("reward.batch", 1, _MANY, 64),
    ("convert.calibration_rows", 1, _MANY, 128),
    ("convert.max_eval_drop", 0, 100, 5),
    ("eval.timeout_s", _TINY, _MANY, 600),
    ("eval.lm_eval_limit", 1, _MANY, 200),
    ("smoke.greedy_tokens", 1, _MANY, 5),
    ("smoke.max_new_tokens", 1, _MANY, 64),
    ("smoke.eval_samples", 0, _MANY, 200),
    ("smoke.kv_cache_gib", 1, _MANY, 1),
    ("smoke.max_model_len", 1, _MANY, 1024),
    ("smoke.timeout_s", _TINY, _MANY, 900),
    ("timeouts.prepare_data_s", _TINY, _MANY, 3600),
    ("timeouts.prepare_base_s", _TINY, _MANY, 3600),
    ("timeouts.rollout_base_s", _TINY, _MANY, 3600),
    ("timeouts.gather_s", _TINY, _MANY, 3600),
    ("timeouts.reference_s", _TINY, _MANY, 3600),
    ("timeouts.merge_s", _TINY, _MANY, 3600),
    ("timeouts.convert_s", _TINY, _MANY, 3600),
    ("timeouts.quantize_s", _TINY, _MANY, 3600),
    ("timeouts.lm_eval_s", _TINY, _MANY, 3600),
    ("smoke.min_stop_rate", 0, 1, 0.9),
    ("smoke.max_degenerate_rate", 0, 1, 0.02),
    ("smoke.threads", 1, _MANY, 1),
    ("smoke.tensor_parallel", 1, 64, 1),
    ("paths.wait_s", 0, _MANY, 0),
)

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "min_lr_ratio": ("cosine_with_min_lr", "polynomial", "warmup_stable_decay"),
    "decay_ratio": ("warmup_stable_decay",),
    "power": ("polynomial",),
    "num_cycles": ("cosine_with_restarts",),
}
"""Schedules that read an option."""
STAGES = (
    "prepare_data", "prepare_base", "rollout_base", "train", "gather", "merge", "convert",
    "smoke_eval", "quantize", "smoke_quantized", "lm_eval",
)  # fmt: skip
"""Names of the chain's stages, as `flows/chain/chain.py` runs them."""


def out_of_range(settings: Mapping[str, Any]) -> list[Finding]:
    """Refuse numbers outside of `LIMITS`.

    Args:
        settings: the resolved configuration of a command; it need not have all of these keys.
    """
    findings = []
    for key, low, high, sample in LIMITS:
        section, name = key.split(".")
        value = settings.get(section, {}).get(name)
        if value is None or low <= value <= high:  # False for NaN
            continue
        least = "more than 0" if low == _TINY else f"at least {low:g}"
        allowed = f"{least}, at most {high:g}" if high < _MANY else least
        findings.append(Finding(key, f"{value:g}", allowed, f"{key}={sample:g}"))
    return findings


def divides(train: Mapping[str, Any]) -> list[Finding]:
    """Refuse a global batch that is not a positive multiple of what all ranks process at once.

    Args:
        train: the section.
    """
    global_size, micro = train["global_batch_size"], train["micro_batch_size"]
    nproc, nodes, sharing = train["nproc"], train["nodes"], train["sequence_parallel"]
    if min(micro, nproc, nodes) < 1:
        override = "train.micro_batch_size=1"
        return [Finding("train.micro_batch_size", str(micro), "at least 1", override)]
    if sharing < 1 or nproc * nodes % sharing:
        return []  # `out_of_range` and `model.shared_rows` report that
    together = micro * nproc * nodes // sharing
    if global_size > 0 and global_size % together == 0:
        return []
    terms, names = f"{micro} x {nproc} x {nodes}", "micro x nproc x nodes"
    if sharing > 1:
        terms, names = f"{terms} / {sharing}", f"{names} / sequence_parallel"
    lower = max(global_size, 0) // together * together
    near = [str(size) for size in (lower, lower + together) if size > 0]
    return [
        Finding(
            "train.global_batch_size",
            str(global_size),
            f"a multiple of {terms} ({names}) = {together}",
            " or ".join(f"train.global_batch_size={size}" for size in near),
        )
    ]


def lengths(max_len: int, max_model_len: int | None, context: int | None) -> list[Finding]:
    """Check that the served context holds what was trained, and the model's context both.

    Args:
        max_len: `train.max_len`, tokens.
        max_model_len: `smoke.max_model_len`, tokens.
        context: of the base model, tokens; None if it is not known.
    """
    findings = []
    if max_model_len is not None and max_model_len < max_len:
        allowed = f"at least train.max_len={max_len}"
        override = f"smoke.max_model_len={max_len}"
        findings.append(Finding("smoke.max_model_len", str(max_model_len), allowed, override))
    if context is not None and max_len > context:
        allowed, override = f"at most the model's context, {context}", f"train.max_len={context}"
        findings.append(Finding("train.max_len", str(max_len), allowed, override))
    return findings


def offload(stage: int, optimizer: str, param: str) -> list[Finding]:
    """Refuse to offload what the ZeRO stage does not partition."""
    findings = []
    if optimizer == "cpu" and stage < 1:
        findings.append(
            Finding("zero.offload_optimizer", "cpu with ZeRO-0", "needs ZeRO-1 to 3", "zero=zero2")
        )
    if param == "cpu" and stage < 3:
        findings.append(
            Finding("zero.offload_param", f"cpu with ZeRO-{stage}", "needs ZeRO-3", "zero=zero3")
        )
    return findings


def optimizer(name: str, offload: str) -> list[Finding]:
    """Refuse 8-bit moments in host memory: DeepSpeed's optimizer there has none."""
    if name == "adamw" or offload != "cpu":
        return []
    value, allowed = f"{name} with zero.offload_optimizer=cpu", "DeepSpeed's CPUAdam has no 8 bits"
    override = "train.optimizer=adamw or zero.offload_optimizer=none"
    return [Finding("train.optimizer", value, allowed, override)]


def evaluation(train: Mapping[str, Any]) -> list[Finding]:
    """Check that the metric is measured, and that evaluations exist if a setting needs them.

    Args:
        train: the section.
    """
    findings = []
    try:
        direction(train["objective"], train["best_metric"])
    except ConfigError as error:
        value = f"{train['best_metric']} with train.objective={train['objective']}"
        allowed = error.hint.replace("train.best_metric=", "").replace("|", ", ")
        findings.append(Finding("train.best_metric", value, allowed, "train.best_metric=loss"))
    if train["eval_steps"]:
        return findings
    if train["keep"] == "best":
        findings.append(_without_evaluations("train.keep", "best", "train.keep=last"))
    if train["early_stop_patience"]:
        patience = str(train["early_stop_patience"])
        override = "train.early_stop_patience=0"
        findings.append(_without_evaluations("train.early_stop_patience", patience, override))
    return findings


def _without_evaluations(key: str, value: str, override: str) -> Finding:
    allowed = "needs evaluations during training"
    override = f"train.eval_steps=<steps> or {override}"
    return Finding(key, f"{value} with train.eval_steps=0", allowed, override)


def schedule(train: Mapping[str, Any]) -> list[Finding]:
    """Refuse options that the chosen schedule does not read.

    Args:
        train: the section.
    """
    findings = []
    for name, readers in _OPTIONS.items():
        default = getattr(Optim, name)
        if train[name] != default and train["scheduler"] not in readers:
            value = f"{train[name]:g} with train.scheduler={train['scheduler']}"
            allowed = f"only {', '.join(readers)} read{'s' * (len(readers) == 1)} it"
            override = f"train.{name}={default:g} or train.scheduler={readers[0]}"
            findings.append(Finding(f"train.{name}", value, allowed, override))
    return findings


def resume(how: str) -> list[Finding]:
    """Check that `train.resume` is a word or a folder with a complete checkpoint."""
    if how in ("auto", "never"):
        return []
    path = Path(how).expanduser()
    if newest(path) is not None:
        return []
    value = f"{path} holds no complete checkpoint" if path.is_dir() else f"{path} does not exist"
    allowed = "auto, never, or a folder step-????????"
    return [Finding("train.resume", value, allowed, "train.resume=auto")]


def forced(names: Sequence[str], steps: Collection[str] = ()) -> list[Finding]:
    """Refuse names in `force` that are not stages.

    Args:
        names: stages to run again; `step.stage` for a stage of one step of a chain.
        steps: names of the chain's steps.
    """
    known = [*STAGES, *(f"{step}.{stage}" for step in steps for stage in STAGES)]
    findings = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            override = " or ".join(f"force=[{stage}]" for stage in near) or "force=[train]"
            allowed = f"the stages are {', '.join(STAGES)}"
            if steps:
                allowed += f"; of one step alone: {next(iter(steps))}.train"
            findings.append(Finding("force", f"no stage {name!r}", allowed, override))
    return findings


def shard_size(text: str) -> list[Finding]:
    """Refuse a size of served files that is not like 5GB."""
    if re.fullmatch(r"[1-9]\d*\s*([KMGT]i?B|[KMGT]|B)?", text, re.IGNORECASE):
        return []
    allowed = "a whole number with a unit, such as 500MB"
    return [Finding("convert.max_shard_size", repr(text), allowed, "convert.max_shard_size=5GB")]
