"""Numbers that have to be within limits; the schema knows only their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.config.checks.finding import Finding

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
    ("train.epochs", _TINY, _MANY, 1),
    ("train.max_steps", 1, _MANY, 100),
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
    ("peft.pissa_niter", 1, 1000, 16),
    ("zero.stage", 0, 3, 2),
    ("zero.bucket_size", 1, _MANY, 50_000_000),
    ("zero.persistence_threshold", 0, _MANY, 100_000),
    ("rl.prompts", 1, _MANY, 32),
    ("rl.samples", 1, _MANY, 4),
    ("rl.iterations", 1, _MANY, 100),
    ("rl.passes", 1, _MANY, 1),
    ("rl.eval_prompts", 1, _MANY, 128),
    ("rl.gamma", 0, 1, 1),
    ("rl.lam", 0, 1, 0.95),
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
    ("rollout.tensor_parallel", 1, _MANY, 1),
    ("rollout.kv_cache_gib", 0.01, _MANY, 1),
    ("rollout.gpu_memory", 0.01, 1, 0.5),
    ("rollout.max_num_seqs", 1, _MANY, 256),
    ("rollout.timeout_s", _TINY, _MANY, 900),
    ("reward.timeout_s", _TINY, _MANY, 60),
    ("reward.retries", 0, _MANY, 2),
    ("reward.batch", 1, _MANY, 64),
    ("smoke.greedy_tokens", 1, _MANY, 5),
    ("smoke.max_new_tokens", 1, _MANY, 64),
    ("smoke.eval_samples", 0, _MANY, 200),
    ("smoke.kv_cache_gib", 1, _MANY, 1),
    ("smoke.max_model_len", 1, _MANY, 1024),
    ("smoke.timeout_s", _TINY, _MANY, 900),
    ("smoke.min_stop_rate", 0, 1, 0.9),
    ("smoke.max_degenerate_rate", 0, 1, 0.02),
    ("smoke.threads", 1, _MANY, 1),
    ("smoke.tensor_parallel", 1, 64, 1),
    ("paths.wait_s", 0, _MANY, 0),
)


def out_of_range(settings: Mapping[str, Any]) -> list[Finding]:
    """Numbers that have to be within limits."""
    found = []
    for key, low, high, sample in LIMITS:
        section, name = key.split(".")
        value = settings[section][name]
        if value is None or low <= value <= high:  # neither for NaN
            continue
        least = "more than 0" if low == _TINY else f"at least {low:g}"
        allowed = f"{least}, at most {high:g}" if high < _MANY else least
        found.append(Finding(key, f"{value:g}", allowed, f"{key}={sample:g}"))
    return found
