"""Types of settings: numbers with bounds, and those that are one of several words."""

from typing import Annotated, Literal

from annotated_types import Ge, Interval

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, le=1e12)]
NonNegative = Annotated[float, Interval(ge=0, le=1e12)]
Share = Annotated[float, Interval(ge=0, le=1)]
LessThanHalf = Annotated[float, Interval(ge=0, lt=0.5)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
Rate = Annotated[float, Interval(gt=0, le=10)]
"""A learning rate."""
Decay = Annotated[float, Interval(ge=0, lt=1)]
"""Share of a moment that AdamW keeps at each step."""
ZeroStage = Annotated[int, Interval(ge=0, le=3)]
Staleness = Annotated[int, Interval(ge=0, le=1)]

Dtype = Literal["bfloat16", "float16", "float32"]
Quantize = Literal[
    "none", "w8a8", "fp8",
    "gguf:f16", "gguf:bf16", "gguf:q8_0", "gguf:q6_k", "gguf:q5_k_m", "gguf:q4_k_m",
]  # fmt: skip
"""Number formats of the linear layers that are served; `gguf:` for llama.cpp, all its weights."""
QuantizeProfile = Literal["auto", "int8", "fp8", "int4", "relaxed", "standard"]
"""Drift limits of quantised models, see `tasks/drift/fingerprint.py`."""
Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""transformers' `attn_implementation`."""
ModelKind = Literal["toy", "hf"]
DataKind = Literal["toy", "jsonl", "csv", "parquet", "hub"]
ToyTasks = Literal["letters", "calculator"]
OnBadLine = Literal["fail", "skip"]
ControlTokens = Literal["refuse", "keep"]
Mask = Literal["last_answer", "every_answer", "every_token"]
"""Tokens of a conversation that bear loss; `every_token` is for raw texts, as in pre-training."""
Stopping = Literal["first_exhausted", "all_exhausted"]
OnOverlong = Literal["truncate", "refuse", "split"]
"""`split` is for raw texts: they are cut into pieces, so that nothing is left out."""
Objective = Literal[
    "sft", "reward", "dpo", "kto", "orpo", "simpo",
    "ppo", "grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo",
]  # fmt: skip
Optimizer = Literal["adamw", "adamw_8bit"]
Scheduler = Literal[
    "cosine", "cosine_with_min_lr", "cosine_with_restarts", "linear", "polynomial", "inverse_sqrt",
    "warmup_stable_decay", "constant_with_warmup", "constant",
]  # fmt: skip
"""transformers' names; `constant` has no warm-up, whatever `train.warmup_ratio` says."""
Keep = Literal["last", "best"]
PeftKind = Literal["none", "lora", "qlora"]
QuantType = Literal["nf4", "fp4"]
"""4-bit code books of QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""
AdapterInit = Literal["default", "gaussian"]
"""LoRA starts with a random A (`default`: uniform, `gaussian`: normal) and B zero."""
Device = Literal["auto", "cpu", "cuda"]
Offload = Literal["none", "cpu"]
KlIn = Literal["reward", "loss"]
KlEstimator = Literal["k1", "k2", "k3"]
CriticKind = Literal["shared", "separate"]
Correction = Literal["none", "tis", "icepop", "sequence_mask"]
ObservationRole = Literal["user", "tool"]
MergeBase = Literal["auto", "dequantized", "original"]
Rounding = Literal["unbiased", "nearest"]
Engine = Literal["vllm", "server"]
"""`server`: vLLM servers over HTTP."""
SmokeEngine = Literal["vllm", "server", "transformers"]
"""`server` is `vllm serve`, verified over HTTP as a user reaches it."""
Profile = Literal["strict", "standard", "relaxed"]
"""Drift limits, see `tasks/drift/fingerprint.py`."""
